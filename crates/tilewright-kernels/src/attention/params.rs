//! Parameters of the attention kernels: [`AttentionParams`] on the host, [`AttentionParamRegs`] in the kernel.
//!
//! Group size, page size, layout, mask and strides are runtime parameters. Compiled in are only dtypes, head dims, MLA or not,
//! and a variant's hooks. A variant's own parameters follow these.
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

use super::divisor::{Divisor, DivisorRegs};
use tilewright_ptx::{
    build::{Builder, Global, Value},
    sim::Arg,
};

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
    pub fn code(self) -> u32 {
        match self {
            Self::Paged => 0,
            Self::Ragged => 1,
            Self::Blocks => 2,
        }
    }
}

/// Query heads or outputs: address, and strides of rows and heads in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowTensor {
    /// Address in bytes.
    pub address: u64,
    /// Elements between rows.
    pub row: u64,
    /// Elements between heads.
    pub head: u64,
}

impl RowTensor {
    /// Whether each row of a head begins at a multiple of `to` bytes, for elements of `size` bytes.
    pub(crate) fn is_aligned(self, to: u64, size: usize) -> bool {
        are_multiples(to, [self.address, self.row * size as u64, self.head * size as u64])
    }
}

/// Keys or values: address, and strides of pages, tokens and heads in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheTensor {
    /// Address in bytes.
    pub address: u64,
    /// Elements between pages.
    pub page: u64,
    /// Elements between tokens of a page.
    pub token: u64,
    /// Elements between heads.
    pub head: u64,
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

/// Scale of stored keys or values: `scales[page * page_stride + head * head_stride]`, or `value` if the address is 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaleTensor {
    /// Address of f32 scales, or 0.
    pub address: u64,
    /// Elements between pages.
    pub page: u64,
    /// Elements between heads.
    pub head: u64,
    /// The scale of all pages and heads if there is no array.
    pub value: f32,
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

/// The positional (RoPE) part of queries and keys in MLA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeTensors {
    /// `[rows, qo_heads, head_dim_pe]`
    pub q: RowTensor,
    /// `[pages, slots, kv_heads, head_dim_pe]`
    pub k: CacheTensor,
}

/// Addresses of a plan's arrays: see [`items`](super::items).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlanArrays {
    /// [`WorkItem`](super::items::WorkItem)s, aligned to 16 bytes.
    pub items: u64,
    /// `[workers + 1]` u32.
    pub worker_indptr: u64,
    /// u32.
    pub merge_deps: u64,
    /// [`MergeItem`](super::items::MergeItem)s, aligned to 16 bytes.
    pub merges: u64,
    /// [`MergeSource`](super::items::MergeSource)s, aligned to 8 bytes.
    pub sources: u64,
    /// `[merges]` u32, all 0.
    pub arrival_counters: u64,
    /// [`RequestRows`](super::items::RequestRows), aligned to 8 bytes.
    pub requests: u64,
    /// Number of requests; at least 1 if an item has rows of several.
    pub num_requests: u32,
    /// i32: page numbers, or block numbers.
    pub indices: u64,
    /// Mask bits, or 0.
    pub mask_bits: u64,
}

/// A window without a limit.
pub const UNLIMITED: u32 = u32::MAX;

/// All arguments of an attention kernel. Grid: `[workers, 1, 1]`.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionParams {
    /// Queries.
    pub q: RowTensor,
    /// Keys.
    pub k: CacheTensor,
    /// Values; ignored by MLA kernels, whose values are the first part of the keys.
    pub v: CacheTensor,
    /// The positional part; present in MLA only.
    pub pe: Option<PeTensors>,
    /// The output.
    pub o: RowTensor,
    /// The address of `[rows, qo_heads]` f32, or 0.
    pub lse: u64,
    /// The address of `[partial_rows, head_dim_vo]` f32.
    pub partial_o: u64,
    /// The address of `[partial_rows, 2]` f32: the maximum base-2 logit, and the sum of weights relative to it. An LSE in
    /// their place would round the weight of a state when logits are large.
    pub partial_stats: u64,
    /// The schedule.
    pub plan: PlanArrays,
    /// Query heads.
    pub qo_heads: u32,
    /// Query heads per KV head.
    pub group: u32,
    /// Slots per page, or tokens per block.
    pub page_size: u32,
    /// Maps keys to cache locations.
    pub layout: KvLayout,
    /// Visible keys below a row's position; [`UNLIMITED`] for no limit.
    pub left: u32,
    /// Visible keys above a row's position; 0 is causal.
    pub right: u32,
    /// The softmax scale of `Q · Kᵀ`.
    pub scale: f32,
    /// Scale of stored keys.
    pub k_scale: ScaleTensor,
    /// Scale of stored values.
    pub v_scale: ScaleTensor,
    /// The variant's own arguments.
    pub variant: Vec<Arg>,
}

impl AttentionParams {
    /// The arguments in the order of [`AttentionParamRegs::declare`], then the variant's.
    pub fn args(&self) -> Vec<Arg> {
        let mut args = self.args_before_variant();
        args.extend_from_slice(&self.variant);
        args
    }

    /// The same without the variant's.
    pub(crate) fn args_before_variant(&self) -> Vec<Arg> {
        let row = |tensor: RowTensor| [tensor.address, tensor.row, tensor.head].map(Arg::U64);
        let cache =
            |tensor: CacheTensor| [tensor.address, tensor.page, tensor.token, tensor.head].map(Arg::U64);
        let scale = |scale: ScaleTensor| {
            let [address, page, head] = [scale.address, scale.page, scale.head].map(Arg::U64);
            [address, page, head, Arg::F32(scale.value)]
        };
        let plan = &self.plan;
        let arrays = [
            plan.items,
            plan.worker_indptr,
            plan.merge_deps,
            plan.merges,
            plan.sources,
            plan.arrival_counters,
            plan.requests,
        ];
        let mut args = Vec::with_capacity(64);
        args.extend(row(self.q));
        args.extend([self.k, self.v].into_iter().flat_map(cache));
        if let Some(pe) = self.pe {
            args.extend(row(pe.q));
            args.extend(cache(pe.k));
        }
        args.extend(row(self.o));
        args.extend([self.lse, self.partial_o, self.partial_stats].map(Arg::U64));
        args.extend(arrays.map(Arg::U64));
        let [indices, mask_bits] = [plan.indices, plan.mask_bits].map(Arg::U64);
        args.extend([Arg::U32(plan.num_requests), indices, mask_bits, Arg::U32(self.qo_heads)]);
        args.extend([self.group, self.page_size].into_iter().flat_map(|number| Divisor::new(number).args()));
        args.extend([self.layout.code(), self.left, self.right].map(Arg::U32));
        args.push(Arg::F32(self.scale));
        args.extend([self.k_scale, self.v_scale].into_iter().flat_map(scale));
        args
    }
}

/// A [`RowTensor`] in a kernel.
#[derive(Debug, Clone, Copy)]
pub struct RowTensorRegs<'k> {
    /// Address in bytes.
    pub address: Value<'k, u64>,
    /// Elements between rows.
    pub row: Value<'k, u64>,
    /// Elements between heads.
    pub head: Value<'k, u64>,
}

/// A [`CacheTensor`] in a kernel.
#[derive(Debug, Clone, Copy)]
pub struct CacheTensorRegs<'k> {
    /// Address in bytes.
    pub address: Value<'k, u64>,
    /// Elements between pages.
    pub page: Value<'k, u64>,
    /// Elements between tokens of a page.
    pub token: Value<'k, u64>,
    /// Elements between heads.
    pub head: Value<'k, u64>,
}

/// A [`ScaleTensor`] in a kernel.
#[derive(Debug, Clone, Copy)]
pub struct ScaleTensorRegs<'k> {
    /// Scales; the address may be 0.
    pub scales: Global<'k, f32>,
    /// Elements between pages.
    pub page: Value<'k, u64>,
    /// Elements between heads.
    pub head: Value<'k, u64>,
    /// The scale of all pages and heads if the address is 0.
    pub value: Value<'k, f32>,
}

/// All kernel parameters except the variant's; the fields are those of [`AttentionParams`] and [`PlanArrays`].
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "documented in `AttentionParams` and `PlanArrays`")]
pub struct AttentionParamRegs<'k> {
    pub q: RowTensorRegs<'k>,
    pub k: CacheTensorRegs<'k>,
    pub v: CacheTensorRegs<'k>,
    /// The positional part of queries and keys in MLA.
    pub pe: Option<(RowTensorRegs<'k>, CacheTensorRegs<'k>)>,
    pub o: RowTensorRegs<'k>,
    pub lse: Global<'k, f32>,
    pub partial_o: Global<'k, f32>,
    pub partial_stats: Global<'k, f32>,
    pub items: Global<'k, u32>,
    pub worker_indptr: Global<'k, u32>,
    pub merge_deps: Global<'k, u32>,
    pub merges: Global<'k, u32>,
    pub sources: Global<'k, u32>,
    pub arrival_counters: Global<'k, u32>,
    pub requests: Global<'k, u32>,
    pub num_requests: Value<'k, u32>,
    pub indices: Global<'k, u32>,
    /// Address of the mask bits, loaded as bytes.
    pub mask_bits: Value<'k, u64>,
    pub qo_heads: Value<'k, u32>,
    pub group: DivisorRegs<'k>,
    pub page_size: DivisorRegs<'k>,
    /// [`KvLayout::code`]
    pub layout: Value<'k, u32>,
    pub left: Value<'k, u32>,
    pub right: Value<'k, u32>,
    pub scale: Value<'k, f32>,
    pub k_scale: ScaleTensorRegs<'k>,
    pub v_scale: ScaleTensorRegs<'k>,
}

impl<'k> AttentionParamRegs<'k> {
    /// Declares the parameters, before all others; `mla` kernels have two more tensors.
    #[track_caller]
    pub fn declare(k: &'k Builder, mla: bool) -> Self {
        let _line = k.at_line(std::panic::Location::caller());
        // fields are evaluated in source order
        Self {
            q: RowTensorRegs::declare(k, "q"),
            k: CacheTensorRegs::declare(k, "k"),
            v: CacheTensorRegs::declare(k, "v"),
            pe: mla.then(|| (RowTensorRegs::declare(k, "q_pe"), CacheTensorRegs::declare(k, "k_pe"))),
            o: RowTensorRegs::declare(k, "o"),
            lse: k.global("lse"),
            partial_o: k.global("partial_o"),
            partial_stats: k.global("partial_stats"),
            items: k.global("items"),
            worker_indptr: k.global("worker_indptr"),
            merge_deps: k.global("feeds"),
            merges: k.global("merges"),
            sources: k.global("sources"),
            arrival_counters: k.global("counters"),
            requests: k.global("requests"),
            num_requests: k.param("num_requests"),
            indices: k.global("indices"),
            mask_bits: k.param("mask_bits"),
            qo_heads: k.param("qo_heads"),
            group: DivisorRegs::declare(k, "group"),
            page_size: DivisorRegs::declare(k, "page_size"),
            layout: k.param("layout"),
            left: k.param("left"),
            right: k.param("right"),
            scale: k.param("scale"),
            k_scale: ScaleTensorRegs::declare(k, "k_scale"),
            v_scale: ScaleTensorRegs::declare(k, "v_scale"),
        }
    }

    /// Whether the LSE is requested.
    #[track_caller]
    pub fn has_lse(&self) -> Value<'k, bool> {
        is_non_null(self.lse)
    }

    /// Whether the layout is `layout`.
    #[track_caller]
    pub fn has_layout(&self, layout: KvLayout) -> Value<'k, bool> {
        self.layout.eq(layout.code())
    }
}

impl<'k> RowTensorRegs<'k> {
    #[track_caller]
    fn declare(k: &'k Builder, name: &str) -> Self {
        let [address, row, head] = ["", "_row", "_head"].map(|of| k.param(&format!("{name}{of}")));
        Self { address, row, head }
    }
}

impl<'k> CacheTensorRegs<'k> {
    #[track_caller]
    fn declare(k: &'k Builder, name: &str) -> Self {
        let [address, page, token, head] =
            ["", "_page", "_token", "_head"].map(|of| k.param(&format!("{name}{of}")));
        Self { address, page, token, head }
    }

    /// The offset of a slot of a page and head, in elements.
    #[track_caller]
    pub(crate) fn offset(
        &self,
        (page, slot): (Value<'k, u64>, Value<'k, u64>),
        kv_head: Value<'k, u32>,
    ) -> Value<'k, u64> {
        page * self.page + slot * self.token + kv_head.to_u64() * self.head
    }
}

impl<'k> ScaleTensorRegs<'k> {
    #[track_caller]
    fn declare(k: &'k Builder, name: &str) -> Self {
        let scales = k.global(name);
        let [page, head] = ["_page", "_head"].map(|of| k.param(&format!("{name}{of}")));
        let value = k.param(&format!("{name}_factor"));
        Self { scales, page, head, value }
    }

    /// Whether there is an array of scales, not one value.
    #[track_caller]
    pub fn is_array(self) -> Value<'k, bool> {
        is_non_null(self.scales)
    }

    /// The scale of a page and head.
    #[track_caller]
    pub fn at(self, k: &'k Builder, page: Value<'k, u32>, head: Value<'k, u32>) -> Value<'k, f32> {
        let value = k.var("factor", self.value);
        k.when(self.is_array(), || {
            let offset = page.to_u64() * self.page + head.to_u64() * self.head;
            value.set(self.scales.at_wide(offset).load());
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

#[cfg(test)]
mod tests {
    use super::{
        AttentionParamRegs, AttentionParams, CacheTensor, KvLayout, PeTensors, PlanArrays, RowTensor,
        ScaleTensor,
    };
    use tilewright_ptx::{
        build::{Builder, Value},
        ir::ParamKind,
        isa::types::Class,
        sim::{Arg, Launch, Memory},
    };

    /// Parameters that are all different.
    fn params(mla: bool) -> AttentionParams {
        let row = |first| RowTensor { address: first, row: first + 1, head: first + 2 };
        let cache =
            |first| CacheTensor { address: first, page: first + 1, token: first + 2, head: first + 3 };
        let scale = |first: u64| ScaleTensor {
            address: first,
            page: first + 1,
            head: first + 2,
            value: f32::from_bits(first as u32 + 3),
        };
        AttentionParams {
            q: row(10),
            k: cache(20),
            v: cache(30),
            pe: mla.then(|| PeTensors { q: row(40), k: cache(50) }),
            o: row(60),
            lse: 70,
            partial_o: 71,
            partial_stats: 72,
            plan: PlanArrays {
                items: 80,
                worker_indptr: 81,
                merge_deps: 82,
                merges: 83,
                sources: 84,
                arrival_counters: 85,
                requests: 86,
                num_requests: 87,
                indices: 88,
                mask_bits: 89,
            },
            qo_heads: 90,
            group: 91,
            page_size: 92,
            layout: KvLayout::Blocks,
            left: 93,
            right: 94,
            scale: f32::from_bits(95),
            k_scale: scale(100),
            v_scale: scale(110),
            variant: vec![Arg::U32(120)],
        }
    }

    /// Each parameter's value and the value that `params` passes for it.
    fn fields<'k>(params: &AttentionParamRegs<'k>, variant: Value<'k, u32>) -> Vec<(Value<'k, u32>, u32)> {
        let row = |p: super::RowTensorRegs<'k>, first: u32| {
            vec![(p.address.low(), first), (p.row.low(), first + 1), (p.head.low(), first + 2)]
        };
        let cache = |p: super::CacheTensorRegs<'k>, first: u32| {
            let [a, b, c, d] = [p.address, p.page, p.token, p.head].map(Value::<u64>::low);
            vec![(a, first), (b, first + 1), (c, first + 2), (d, first + 3)]
        };
        let scale = |p: super::ScaleTensorRegs<'k>, first: u32| {
            let [a, b, c] = [p.scales.address(), p.page, p.head].map(Value::<u64>::low);
            vec![(a, first), (b, first + 1), (c, first + 2), (p.value.reinterpret(), first + 3)]
        };
        let p = params;
        let floats = [(p.lse, 70), (p.partial_o, 71), (p.partial_stats, 72)];
        let arrays =
            [p.items, p.worker_indptr, p.merge_deps, p.merges, p.sources, p.arrival_counters, p.requests];
        let words = [(p.num_requests, 87), (p.indices.address().low(), 88), (p.mask_bits.low(), 89)];
        let numbers = [(p.qo_heads, 90), (p.group.by, 91), (p.page_size.by, 92), (p.layout, 2)];
        let others = [(p.left, 93), (p.right, 94), (p.scale.reinterpret(), 95), (variant, 120)];
        let mla = p.pe.map(|(q, k)| [row(q, 40), cache(k, 50)].concat());
        [
            [row(p.q, 10), cache(p.k, 20), cache(p.v, 30), row(p.o, 60)].concat(),
            mla.unwrap_or_default(),
            floats.map(|(p, expected)| (p.address().low(), expected)).to_vec(),
            arrays.iter().zip(80..).map(|(p, expected)| (p.address().low(), expected)).collect(),
            [words.to_vec(), numbers.to_vec(), others.to_vec()].concat(),
            [scale(p.k_scale, 100), scale(p.v_scale, 110)].concat(),
        ]
        .concat()
    }

    #[test]
    fn arguments_are_in_the_order_of_parameters() {
        for mla in [false, true] {
            let mut expected = Vec::new();
            let kernel = Builder::kernel("order", 32, |k| {
                let params = AttentionParamRegs::declare(k, mla);
                let fields = fields(&params, k.param("variant"));
                let out = k.global::<u32>("out");
                expected = fields.iter().map(|(_, wanted)| *wanted).collect();
                let store = |(at, (found, _)): (usize, (Value<'_, u32>, u32))| out.plus(at).store(found);
                k.when(k.thread().eq(0), || fields.into_iter().enumerate().for_each(store));
            })
            .unwrap();
            let mut memory = Memory::new();
            let out = memory.alloc(4 * expected.len());
            let args = [params(mla).args(), vec![Arg::U64(out)]].concat();
            let classes: Vec<ParamKind> = kernel.params.iter().map(|param| param.kind).collect();
            assert_eq!(classes, args.iter().map(kind).collect::<Vec<_>>());
            Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed: 0 }.run(&mut memory).unwrap();
            assert_eq!(memory.read::<u32>(out, expected.len()).unwrap(), expected);
        }
    }

    fn kind(arg: &Arg) -> ParamKind {
        match arg {
            Arg::U64(_) => ParamKind::Value(Class::B64),
            Arg::TensorMap(_) => ParamKind::TensorMap,
            _ => ParamKind::Value(Class::B32),
        }
    }
}
