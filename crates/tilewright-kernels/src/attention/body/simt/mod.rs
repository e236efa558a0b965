//! Fallback attention without tensor cores: any dtypes, any head dims up to 1024, MLA or not, every mask, scale and hook, in f32.
//!
//! Grid: `[workers, 1, 1]`; shapes, layouts and arguments: [`params`](crate::attention::params). Schedule: [`items`](crate::attention::items), with
//! items of one KV head and any number of rows and keys. Arithmetic is IEEE 754 additions and multiplications only, so results
//! are identical on every GPU and in the simulator.
//!
//! ```text
//! CTA w   its items, in order; per item, blocks of `SimtConfig::rows` packed rows (token · group + query head of the group)
//! block   Q in shared memory, widened and hooked; for each KV tile of 64 keys:
//!   key_table  addresses, positions and scales of the tile's keys                          key_table.rs
//!   qk         S = Q · Kᵀ, 32 dims at a time                                               qk.rs
//!   softmax    hooks and masks, then the online softmax, one row at a time                 softmax.rs
//!   pv         O = O · rescale + P · V, 64 dims at a time                                  pv.rs
//! end     output, or a partial state; the last CTA to arrive performs the merge            epilogue.rs, merge.rs
//! ```
//!
//! Each warp owns a quarter of a block's rows. Blocks of up to 8 rows, as in decoding, have specialized products without the work
//! of larger blocks. KV tiles begin at multiples of 64 keys of the segment, each dot product is one chain of multiply-adds in
//! ascending order, and masked keys never contribute. A row's bits therefore do not depend on the batch, given the same splits.

mod block;
mod elements;
mod epilogue;
mod key_table;
mod merge;
mod pv;
mod qk;
mod row_table;
mod softmax;

use crate::{
    attention::params::KernelKind,
    variant::{Arithmetic, Hooks},
};
use block::{RowBlock, SimtCta};
use key_table::KeyTable;
use softmax::MASKED;
use tilewright::{
    Dtype, HeadDim,
    attention::variant::{ExpressionVariant, Hook},
};
use tilewright_ptx::{Builder, Invalid, Kernel};

/// Threads per CTA.
pub(crate) const THREADS: u32 = 128;
/// Keys per KV tile.
pub(crate) const KEYS: u32 = 64;
/// Maximum head dim.
pub const MAX_HEAD_DIM: u32 = 1024;
/// Dims of keys in shared memory at once.
const K_DIMS: u32 = 32;
/// Stride of keys in shared memory; four adjacent lanes load four dims each without bank conflicts.
const K_STRIDE: u32 = K_DIMS + 4;
/// Warps per CTA.
const WARPS: u32 = THREADS / 32;
/// Rows per block, with the maximum shared memory for it: with 75 KiB three CTAs share an SM of Hopper and two one of sm_80; 99
/// KiB per CTA are available on every GPU. 8 rows always fit.
const ROWS: [(u32, usize); 3] = [(32, 75 << 10), (16, 99 << 10), (8, usize::MAX)];
/// Rows per warp up to which a block has specialized products.
const SMALL_ROWS_PER_WARP: u32 = 2;

/// Compile-time configuration of a kernel, beside its variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SimtConfig {
    /// Dtype of queries: any.
    pub dtype_q: Dtype,
    /// Dtype of outputs: f32, f16, bf16 or e4m3.
    pub dtype_o: Dtype,
    /// Dtype of keys and values: any.
    pub dtype_kv: Dtype,
    /// Elements of queries and keys, and of values and outputs, 1 to 1024 each.
    pub head_dim: HeadDim,
    /// Whether queries and keys are two tensors each, the first part of the keys being the values: the parts have `head_dim.vo`
    /// and `head_dim.qk - head_dim.vo` elements.
    pub mla: bool,
}

impl SimtConfig {
    /// Packed rows per block: a tiling of a multiple of it wastes no rows.
    pub fn rows(self) -> u32 {
        let fits = |(rows, most): &(u32, usize)| self.shared_bytes_of(*rows) <= *most;
        ROWS.into_iter().find(fits).map_or(8, |(rows, _)| rows)
    }

    /// Approximate shared memory per CTA; below 99 KiB, which every GPU from sm_80 on has.
    fn shared_bytes_of(self, rows: u32) -> usize {
        let of_row = self.q_stride() + self.o_stride() + KEYS + 10;
        let of_key = 10;
        4 * (rows * of_row + KEYS * of_key + self.stage()) as usize
    }

    /// Row stride of Q in shared memory, in elements.
    fn q_stride(self) -> u32 {
        (self.head_dim.qk as u32).next_multiple_of(K_DIMS)
    }

    /// Dims of values in shared memory at once.
    fn v_dims(self) -> u32 {
        if self.head_dim.vo > 32 { 64 } else { 32 }
    }

    /// Row stride of O in shared memory, in elements.
    fn o_stride(self) -> u32 {
        (self.head_dim.vo as u32).next_multiple_of(self.v_dims())
    }

    /// Elements of the stage, which holds keys first, then values.
    fn stage(self) -> u32 {
        KEYS * K_STRIDE.max(self.v_dims())
    }

    /// The kernel's kind.
    pub(crate) fn kind(self) -> KernelKind {
        if self.mla { KernelKind::Mla } else { KernelKind::Plain }
    }

    fn check(self, name: &str, hooks: &Hooks<'_>) -> Result<(), Invalid> {
        let HeadDim { qk, vo } = self.head_dim;
        let in_range = |dim: usize| (1..=MAX_HEAD_DIM as usize).contains(&dim);
        let needs_pairs = [Hook::Query, Hook::Key].into_iter().any(|hook| hooks.is_live(hook));
        let is_cache_only = matches!(self.dtype_o, Dtype::E5m2 | Dtype::I8);
        let has_wrong_parity = needs_pairs && !qk.is_multiple_of(2);
        let reasons = [
            (is_cache_only, format!("o dtype = {}, expected f32, f16, bf16 or e4m3", self.dtype_o)),
            (!in_range(qk), format!("head_dim.qk = {qk}, expected 1..={MAX_HEAD_DIM}")),
            (!in_range(vo), format!("head_dim.vo = {vo}, expected 1..={MAX_HEAD_DIM}")),
            (
                self.mla && qk <= vo,
                format!("head_dim = {qk}/{vo} latent, expected more for keys than for values"),
            ),
            (has_wrong_parity, format!("head_dim.qk = {qk}, expected an even one: a hook needs pairs")),
        ];
        let wrong: Vec<String> =
            reasons.into_iter().filter_map(|(wrong, why)| wrong.then_some(why)).collect();
        if wrong.is_empty() { Ok(()) } else { Err(Invalid::of(name, wrong.join("; "))) }
    }
}

/// Builds the kernel. Parameters: those of [`AttentionParams`](crate::attention::params::AttentionParams), with the variant's as in
/// [`arguments`](crate::variant::arguments). Grid: `[workers, 1, 1]`.
///
/// Alignment: that of elements. The plan's `requests` are read for items of several requests, and for merges if the variant's
/// update or output hook reads a request or a query's position.
///
/// # Errors
/// When a head dim is 0 or above 1024, or odd with a hook of queries or keys; with all reasons.
pub fn attention(name: &str, config: SimtConfig, variant: &ExpressionVariant) -> Result<Kernel, Invalid> {
    let hooks = Hooks::of(name, variant)?.with(Arithmetic::Exact);
    config.check(name, &hooks)?;
    Builder::dependent_kernel(name, THREADS, |k| SimtCta::new(k, config, &hooks).run())
}
