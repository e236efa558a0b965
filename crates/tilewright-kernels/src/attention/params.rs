//! Parameters of the attention kernels: [`AttentionParams`] on the host, [`AttentionParamRegs`] in the kernel.
//!
//! Group size, page size, layout, mask and strides are runtime parameters. Compiled in are only dtypes, head dims, MLA or not,
//! and a variant's hooks. A variant's own parameters are the last.
//!
//! Shapes, with strides in elements: q `[rows, qo_heads, head_dim_qk]`, o `[rows, qo_heads, head_dim_vo]`, lse `[rows, qo_heads]`
//! f32, dense, base 2; k and v `[pages, slots, kv_heads, head_dim]`, where a ragged tensor is one page. Key `j` of a segment is
//!
//! | layout | page | slot | position |
//! |---|---|---|---|
//! | [`KvLayout::Paged`] | `indices[kv_start + j / page_size]` | `j % page_size` | `base + j` |
//! | [`KvLayout::Ragged`] | 0 | `kv_start + j` | `base + j` |
//! | [`KvLayout::Blocks`] | `indices[kv_start + j / page_size]` | `j % page_size` | `page * page_size + slot` |
//!
//! and its element 0 is at `page * page stride + slot * token stride + head * head stride`. Blocks have a page stride of
//! `page_size` tokens.

use super::divisor::Divisor;
use crate::params::{GlobalArray, Param, each};
use tilewright_ptx::{Arg, Builder, Global, TensorMap, Value};

/// Maps the keys of a segment to locations in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvLayout {
    /// Pages of a page table.
    Paged,
    /// Consecutive tokens.
    Ragged,
    /// Listed blocks of a block-sparse tensor; the page size is the block size, and a key's position is its token index.
    Blocks,
}

impl KvLayout {
    /// The value of the kernel parameter `layout`.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::Paged => 0,
            Self::Ragged => 1,
            Self::Blocks => 2,
        }
    }
}

crate::params! {
    /// Query heads or outputs: address, and strides of rows and heads in elements.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct RowTensor => RowTensorRegs(this) {
        /// Address in bytes.
        address "": u64,
        /// Elements between rows.
        row "_row": u64,
        /// Elements between heads.
        head "_head": u64,
    }

    /// Keys or values: address, and strides of pages, tokens and heads in elements.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct CacheTensor => CacheTensorRegs(this) {
        /// Address in bytes.
        address "": u64,
        /// Elements between pages.
        page "_page": u64,
        /// Elements between tokens of a page.
        token "_token": u64,
        /// Elements between heads.
        head "_head": u64,
    }

    /// Scale of stored keys or values: `scales[page * page_stride + head * head_stride]`, or `value` if the address is 0.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct ScaleTensor => ScaleTensorRegs(this) {
        /// Address of f32 scales, or 0.
        address "": u64 as GlobalArray<f32>,
        /// Elements between pages.
        page "_page": u64,
        /// Elements between heads.
        head "_head": u64,
        /// The scale of all pages and heads if there is no array.
        value "_factor": f32,
    }

    /// The positional (RoPE) part of queries and keys in MLA.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct PeTensors => PeTensorRegs(this) {
        /// `[rows, qo_heads, head_dim_pe]`
        q "q_pe": RowTensor,
        /// `[pages, slots, kv_heads, head_dim_pe]`
        k "k_pe": CacheTensor,
    }

    /// Addresses of a plan's arrays: see [`items`](super::items).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct PlanArrays => PlanArrayRegs(this) {
        /// [`WorkItem`](super::items::WorkItem)s, aligned to 16 bytes.
        items: u64 as GlobalArray<u32>,
        /// `[workers + 1]` u32.
        worker_indptr: u64 as GlobalArray<u32>,
        /// u32.
        merge_deps: u64 as GlobalArray<u32>,
        /// [`MergeItem`](super::items::MergeItem)s, aligned to 16 bytes.
        merges: u64 as GlobalArray<u32>,
        /// [`MergeSource`](super::items::MergeSource)s, aligned to 8 bytes.
        sources: u64 as GlobalArray<u32>,
        /// `[merges]` u32, all 0.
        arrival_counters: u64 as GlobalArray<u32>,
        /// [`RequestRows`](super::items::RequestRows), aligned to 8 bytes.
        requests: u64 as GlobalArray<u32>,
        /// Number of requests; at least 1 if an item has rows of several.
        num_requests: u32,
        /// i32: page numbers, or block numbers.
        indices: u64 as GlobalArray<u32>,
        /// Mask bits, loaded as bytes, or 0.
        mask_bits: u64,
    }

    /// Parameters of kernels that draw runs, with which the items begin.
    #[derive(Debug, Clone, PartialEq)]
    pub struct RunParams => RunParamRegs(this) {
        /// Number of runs.
        runs: u32,
        /// Runs with which the CTAs, or pairs of them, of the first launch start, one each.
        started: u32,
        /// CTAs of both launches, or CTAs or pairs of the only one.
        ctas: u32,
        /// Whether this is the second launch.
        host is_second: bool,
        second: u32 = u32::from(this.is_second),
        /// Address of a u32, 0 before and after a launch.
        ticket: u64 as GlobalArray<u32>,
        /// Keys per box of the tensor maps: `WgmmaConfig::box_rows`.
        host box_rows: u32,
        box_shift: u32 = this.box_rows.trailing_zeros(),
        /// Tensor maps of keys and values: `wgmma::kv_map`.
        maps "": [TensorMap; 2][each(["k_map", "v_map"], ())],
    }

    /// Parameters of the kernels of `mla_wgmma`.
    #[derive(Debug, Clone, PartialEq)]
    pub struct MlaWgmmaParams => MlaWgmmaParamRegs(this) {
        /// Keys per box of the tensor maps: `MlaWgmmaConfig::box_rows`.
        host box_rows: u32,
        box_shift: u32 = this.box_rows.trailing_zeros(),
        /// Address of a list of large merges, `[2 + merges]` u32. The first two are 0 before a launch of the kernel, and after one
        /// of the kernel of large merges, which must follow if the plan may have merges of more than `max_fused_states`.
        large_merges: u64 as GlobalArray<u32>,
        /// Tensor maps of the compressed and the positional part of keys: `wgmma::kv_map`.
        maps "": [TensorMap; 2][each(["ckv_map", "kpe_map"], ())],
    }

    /// Parameters that not all attention kernels have.
    #[derive(Debug, Clone, PartialEq, Default)]
    pub struct OwnParams => OwnParamRegs(this, kind: KernelKind) {
        /// The [`Wait`] of the launch.
        host wait: Option<Wait>,
        wait: Option<u32>[matches!(kind, KernelKind::Mma { waits: true, .. }).then_some(())] = this.wait.map(|wait| wait as u32),
        /// Tensor maps of keys and values: `mma::box_map`.
        boxes "": Option<[TensorMap; 2]>[
            matches!(kind, KernelKind::Mma { boxes: true, .. }).then_some(each(["k_map", "v_map"], ()))
        ],
        /// The runs of the launch.
        runs "": Option<RunParams>[(kind == KernelKind::Runs).then_some(())],
        /// The latent keys and the list of large merges.
        latent "": Option<MlaWgmmaParams>[(kind == KernelKind::MlaWgmma).then_some(())],
        /// Merges of the plan, those with arrivals included.
        num_merges: Option<u32>[(kind == KernelKind::LevelMerges).then_some(())],
    }

    /// All arguments of an attention kernel, which has those of its [`KernelKind`]. Grid: `[workers, 1, 1]`.
    #[derive(Debug, Clone, PartialEq)]
    pub struct AttentionParams => AttentionParamRegs(this, kind: KernelKind) {
        /// Queries.
        q: RowTensor,
        /// Keys.
        k: CacheTensor,
        /// Values; ignored by MLA kernels, whose values are the first part of the keys.
        v: CacheTensor,
        /// The positional part; present in MLA only.
        pe "": Option<PeTensors>[matches!(kind, KernelKind::Mla | KernelKind::MlaWgmma).then_some(())],
        /// The output.
        o: RowTensor,
        /// The address of `[rows, qo_heads]` f32, or 0.
        lse: u64 as GlobalArray<f32>,
        /// The address of `[partial_rows, head_dim_vo]` f32.
        partial_o: u64 as GlobalArray<f32>,
        /// The address of `[partial_rows, 2]` f32: the maximum base-2 logit, and the sum of weights relative to it. An LSE in
        /// their place would round the weight of a state when logits are large.
        partial_stats: u64 as GlobalArray<f32>,
        /// The schedule.
        plan "": PlanArrays,
        /// Query heads.
        qo_heads: u32,
        /// Query heads per KV head.
        host group: u32,
        /// Slots per page, or tokens per block.
        host page_size: u32,
        /// Maps keys to cache locations.
        host layout: KvLayout,
        group: Divisor = Divisor::new(this.group),
        page_size: Divisor = Divisor::new(this.page_size),
        /// `KvLayout::code`
        layout: u32 = this.layout.code(),
        /// Visible keys below a row's position; [`UNLIMITED`] for no limit.
        left: u32,
        /// Visible keys above a row's position; 0 is causal.
        right: u32,
        /// The softmax scale of `Q · Kᵀ`.
        scale: f32,
        /// Scale of stored keys.
        k_scale: ScaleTensor,
        /// Scale of stored values.
        v_scale: ScaleTensor,
        /// Those that not all kernels have.
        own "": OwnParams[kind],
        /// The variant's own arguments.
        variant: Vec<Arg>,
    }
}

/// The kinds of attention kernels, by the parameters that not all of them have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelKind {
    /// Without such parameters.
    Plain,
    /// Of `mma` bodies.
    Mma {
        /// Whether it can follow runs.
        waits: bool,
        /// Whether TMA loads keys and values.
        boxes: bool,
    },
    /// Draws runs.
    Runs,
    /// Merges of rows with keys in runs and in other items.
    LevelMerges,
    /// Portable MLA.
    Mla,
    /// MLA of items, or of large merges, on Hopper.
    MlaWgmma,
}

/// The arguments of a variant, whose hooks declare the parameters.
impl Param for Vec<Arg> {
    type Host = Self;
    type Regs<'k> = ();
    type Config = ();

    fn declare(_: &Builder, _: &str, (): ()) {}

    fn push(host: &Self, (): (), args: &mut Vec<Arg>) {
        args.extend_from_slice(host);
    }
}

/// The point at which a kernel waits for the previous launch. If that one has runs, it has itself waited for all before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Before it reads anything but its first item.
    AtStart,
    /// At its end: its items run beside runs.
    AtEnd,
}

/// A window without a limit.
pub const UNLIMITED: u32 = u32::MAX;

impl RowTensor {
    /// Whether each row of a head begins at a multiple of `to` bytes, for elements of `size` bytes.
    pub(crate) fn is_aligned(self, to: u64, size: usize) -> bool {
        are_multiples(to, [self.address, self.row * size as u64, self.head * size as u64])
    }
}

impl CacheTensor {
    /// Whether each token of a head begins at a multiple of `to` bytes, for elements of `size` bytes.
    pub(crate) fn is_aligned(self, to: u64, size: usize) -> bool {
        let strides = [self.page, self.token, self.head].map(|stride| stride * size as u64);
        are_multiples(to, strides) && are_multiples(to, [self.address])
    }
}

fn are_multiples<const N: usize>(of: u64, bytes: [u64; N]) -> bool {
    bytes.iter().all(|bytes| bytes.is_multiple_of(of))
}

impl ScaleTensor {
    /// Whether the scale differs between pages.
    pub(crate) fn is_per_page(self) -> bool {
        self.address != 0 && self.page != 0
    }
}

impl Default for ScaleTensor {
    fn default() -> Self {
        Self { address: 0, page: 0, head: 0, value: 1.0 }
    }
}

impl AttentionParams {
    /// Keys per box of a tensor map: the largest power of two that divides a page, or block, and a KV tile of `tile` keys.
    pub(crate) fn box_rows(&self, tile: u32) -> u32 {
        let page_size = if self.layout == KvLayout::Ragged { tile } else { self.page_size };
        1 << page_size.trailing_zeros().min(tile.trailing_zeros())
    }
}

impl<'k> AttentionParamRegs<'k> {
    /// Whether the LSE is requested.
    #[track_caller]
    pub(crate) fn has_lse(&self) -> Value<'k, bool> {
        is_non_null(self.lse)
    }

    #[track_caller]
    pub(crate) fn has_layout(&self, layout: KvLayout) -> Value<'k, bool> {
        self.layout.eq(layout.code())
    }
}

impl<'k> CacheTensorRegs<'k> {
    /// The offset of a slot of a page and head, in elements.
    #[track_caller]
    pub(crate) fn offset(
        &self,
        page: Value<'k, u64>,
        slot: Value<'k, u64>,
        kv_head: Value<'k, u32>,
    ) -> Value<'k, u64> {
        page * self.page + slot * self.token + kv_head.to_u64() * self.head
    }
}

impl<'k> ScaleTensorRegs<'k> {
    /// Whether there is an array of scales, not one value.
    #[track_caller]
    pub(crate) fn is_array(self) -> Value<'k, bool> {
        is_non_null(self.address)
    }

    /// The scale of a page and head.
    #[track_caller]
    pub fn at(self, k: &'k Builder, page: Value<'k, u32>, head: Value<'k, u32>) -> Value<'k, f32> {
        let value = k.var("factor", self.value);
        k.when(self.is_array(), || {
            let offset = page.to_u64() * self.page + head.to_u64() * self.head;
            value.set(self.address.at_wide(offset).load());
        });
        value.get()
    }
}

/// Whether an address is not 0.
#[track_caller]
fn is_non_null(array: Global<'_, f32>) -> Value<'_, bool> {
    let address = array.address();
    (address.low() | address.high()).ne(0)
}
