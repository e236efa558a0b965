//! Bodies: the implementations of a work item, which differ in the product instruction and in how warps divide the work.
//!
//! | body | product | rows at once | division of the work |
//! |---|---|---|---|
//! | [`simt`] | FMA in f32, exact | up to 32 | warps divide the rows |
//! | `mma_split_kv`, in [`mma`] | `mma.sync` | up to [`MAX_SPLIT_KV_ROWS`], or [`MAX_PAIRED_ROWS`] | warps divide the keys |
//! | `mma_split_q`, in [`mma`] | `mma.sync` | 64 or 128 | warps divide the rows |
//! | [`mla`] | `mma.sync` | up to 64 | groups of warps divide the rows, warps of a group the elements |
//! | [`mla_wgmma`] | `wgmma` | 64 | two warpgroups divide the elements of O and take turns with the keys; a third loads |
//! | [`wgmma`] | `wgmma` | 128 | two warpgroups divide the rows; a third loads |
//!
//! A body loads queries, loops over KV tiles and leaves accumulators with the maximum and sum of each row. Everything else is in
//! [`kernel`](super::kernel). [`choose`](super::choose) says which body a problem gets.
//!
//! Departures:
//!
//! 1. `mma_split_kv` and `mma_split_q` are in one kernel, because a batch has items of both sizes. [`Bodies::SplitKv`] leaves the
//!    larger one out.
//! 2. `simt` has its own row table, key table, softmax, epilogue, arrival and merge: its arithmetic is exact, its elements
//!    have any alignment, and it lacks registers. Positions, windows, mask bits and addresses are shared.
//! 3. `wgmma` draws its items as runs, and has its own online softmax, which overlaps with products. Accumulators have the layout
//!    of `mma` fragments, so hooks, masks, epilogue and merge are shared.

pub mod mla;
pub mod mla_wgmma;
pub mod mma;
mod mma_split_kv;
mod mma_split_q;
pub mod simt;
pub mod wgmma;

use super::{
    kernel::{cta::CurrentItem, layout::BLOCK_ROWS},
    params::{AttentionParams, KvLayout},
};
use tilewright::Dtype;
use tilewright_ptx::Builder;

/// Maximum query rows (tokens times heads of the group) of an item whose keys are divided among warps.
pub const MAX_SPLIT_KV_ROWS: usize = 16;

/// Maximum query rows of an item in a kernel of [`Bodies::SplitKvPairs`].
pub const MAX_PAIRED_ROWS: usize = 2 * MAX_SPLIT_KV_ROWS;

/// Device properties that a kernel depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceLimits {
    /// The compute capability, 90 for 9.0.
    pub arch: u32,
    /// Maximum bytes of shared memory per CTA.
    pub shared_per_cta: usize,
    /// Bytes of shared memory per SM; the system reserves 1,024 of them per CTA.
    pub shared_per_sm: usize,
}

impl DeviceLimits {
    /// Properties of an architecture ("CUDA C++ programming guide", technical specifications per compute capability).
    pub fn of_arch(arch: u32) -> Self {
        let kib = match arch {
            80 | 87 => 164,
            90..=110 => 228,
            _ => 100,
        };
        Self { arch, shared_per_cta: (kib - 1) << 10, shared_per_sm: kib << 10 }
    }

    /// The reason why a device has no body with `cp.async`, if it has none.
    fn unsupported_arch(&self) -> Option<String> {
        let arch = self.arch;
        (arch < 80).then(|| format!("sm_{arch} has no asynchronous copies, expected sm_80 or newer"))
    }

    /// The reason why `tiles` do not fit.
    fn too_little_shared(&self, tiles: &str) -> String {
        let bytes = self.shared_per_cta;
        format!("a CTA has {bytes} bytes of shared memory, which is too little for {tiles}")
    }
}

/// The item bodies that a kernel contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bodies {
    /// Only the body for items of at most [`MAX_SPLIT_KV_ROWS`] rows, for decoding: a third of the code and of the JIT time.
    SplitKv,
    /// The same with two row tiles per warp, for items of at most [`MAX_PAIRED_ROWS`] rows, in plans without larger ones.
    SplitKvPairs,
    /// The same as [`Bodies::SplitKv`] with keys and values that are loaded by TMA, in boxes of 16 keys.
    SplitKvBoxes,
    /// The same in boxes of one key, for pages of one token.
    SplitKvRows,
    /// Both bodies, for items of any size.
    Both,
}

impl Bodies {
    /// Runs the body for the current item.
    fn run<'k>(
        self,
        k: &'k Builder,
        current: &CurrentItem<'k>,
        split_kv: impl FnOnce(),
        split_q: impl FnOnce(),
    ) {
        match self {
            Self::Both => k.when_else(current.rows().le(MAX_SPLIT_KV_ROWS as u32), split_kv, split_q),
            _ => split_kv(),
        }
    }

    /// Keys per box, if TMA loads keys and values.
    pub fn box_keys(self) -> Option<usize> {
        match self {
            Self::SplitKvBoxes => Some(BLOCK_ROWS),
            Self::SplitKvRows => Some(1),
            Self::SplitKv | Self::SplitKvPairs | Self::Both => None,
        }
    }

    /// The bodies whose boxes make up the keys of a cache; `None` if there are none: boxes are parts of pages, or of ragged tensors.
    pub fn of_boxes(layout: KvLayout, page_size: u32) -> Option<Self> {
        match layout {
            KvLayout::Paged if page_size == 1 => Some(Self::SplitKvRows),
            KvLayout::Paged if !page_size.is_multiple_of(BLOCK_ROWS as u32) => None,
            KvLayout::Paged | KvLayout::Ragged => Some(Self::SplitKvBoxes),
            KvLayout::Blocks => None,
        }
    }
}

/// Whether `cp.async` can copy queries and keys: addresses and strides must be multiples of 16 bytes, those of the output of 8.
/// Scales may differ between heads, and between pages only in 8-bit caches. Called on every run, so it must not allocate.
fn accepts_copies(params: &AttentionParams, [q, o, kv]: [Dtype; 3]) -> bool {
    let per_page = params.k_scale.is_per_page() || params.v_scale.is_per_page();
    (kv.size() == 1 || !per_page)
        && params.q.is_aligned(16, q.size())
        && params.k.is_aligned(16, kv.size())
        && params.o.is_aligned(8, o.size())
}
