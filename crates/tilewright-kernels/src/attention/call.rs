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

use super::divisor::{Divisor, DivisorValues};
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
    pub fn word(self) -> u32 {
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
pub struct ScaleArgs {
    /// Address of f32 scales, or 0.
    pub address: u64,
    /// Elements between pages.
    pub page: u64,
    /// Elements between heads.
    pub head: u64,
    /// The scale of all pages and heads if there is no array.
    pub factor: f32,
}

impl ScaleArgs {
    /// Whether the scale differs between pages.
    pub(crate) fn is_of_pages(self) -> bool {
        self.address != 0 && self.page != 0
    }
}

impl Default for ScaleArgs {
    fn default() -> Self {
        Self { address: 0, page: 0, head: 0, factor: 1.0 }
    }
}

/// The positional (RoPE) part of queries and keys in MLA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pe {
    /// `[rows, qo_heads, head_dim_pe]`
    pub q: RowTensor,
    /// `[pages, slots, kv_heads, head_dim_pe]`
    pub k: CacheTensor,
}

/// Addresses of a plan's arrays: see [`items`](super::items).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PlanArgs {
    /// [`WorkItem`](super::items::WorkItem)s, aligned to 16 bytes.
    pub items: u64,
    /// `[workers + 1]` u32.
    pub worker_indptr: u64,
    /// u32.
    pub feeds: u64,
    /// [`MergeItem`](super::items::MergeItem)s, aligned to 16 bytes.
    pub merges: u64,
    /// [`MergeSource`](super::items::MergeSource)s, aligned to 8 bytes.
    pub sources: u64,
    /// `[merges]` u32, all 0.
    pub counters: u64,
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
pub struct Call {
    /// Queries.
    pub q: RowTensor,
    /// Keys.
    pub k: CacheTensor,
    /// Values; ignored by MLA kernels, whose values are the first part of the keys.
    pub v: CacheTensor,
    /// The positional part; present in MLA only.
    pub pe: Option<Pe>,
    /// The output.
    pub o: RowTensor,
    /// The address of `[rows, qo_heads]` f32, or 0.
    pub lse: u64,
    /// The address of `[partial_rows, head_dim_vo]` f32.
    pub partial_o: u64,
    /// The address of `[partial_rows]` f32.
    pub partial_lse: u64,
    /// The schedule.
    pub plan: PlanArgs,
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
    pub k_scale: ScaleArgs,
    /// Scale of stored values.
    pub v_scale: ScaleArgs,
    /// The variant's own arguments.
    pub variant: Vec<Arg>,
}

impl Call {
    /// The arguments in the order of [`AttentionParamRegs::declare`], then the variant's.
    pub fn args(&self) -> Vec<Arg> {
        let row = |tensor: RowTensor| [tensor.address, tensor.row, tensor.head].map(Arg::U64).to_vec();
        let cache = |tensor: CacheTensor| {
            [tensor.address, tensor.page, tensor.token, tensor.head].map(Arg::U64).to_vec()
        };
        let scale = |scale: ScaleArgs| {
            let [address, page, head] = [scale.address, scale.page, scale.head].map(Arg::U64);
            vec![address, page, head, Arg::F32(scale.factor)]
        };
        let plan = &self.plan;
        let arrays = [plan.items, plan.worker_indptr, plan.feeds, plan.merges, plan.sources, plan.counters];
        [
            row(self.q),
            cache(self.k),
            cache(self.v),
            self.pe.map_or_else(Vec::new, |pe| [row(pe.q), cache(pe.k)].concat()),
            row(self.o),
            [self.lse, self.partial_o, self.partial_lse].map(Arg::U64).to_vec(),
            arrays.map(Arg::U64).to_vec(),
            vec![Arg::U64(plan.requests), Arg::U32(plan.num_requests)],
            [plan.indices, plan.mask_bits].map(Arg::U64).to_vec(),
            vec![Arg::U32(self.qo_heads)],
            Divisor::new(self.group).args().to_vec(),
            Divisor::new(self.page_size).args().to_vec(),
            [self.layout.word(), self.left, self.right].map(Arg::U32).to_vec(),
            vec![Arg::F32(self.scale)],
            scale(self.k_scale),
            scale(self.v_scale),
            self.variant.clone(),
        ]
        .concat()
    }
}

/// A [`RowTensor`] in a kernel.
#[derive(Debug, Clone, Copy)]
pub struct RowParams<'k> {
    /// Address in bytes.
    pub address: Value<'k, u64>,
    /// Elements between rows.
    pub row: Value<'k, u64>,
    /// Elements between heads.
    pub head: Value<'k, u64>,
}

/// A [`CacheTensor`] in a kernel.
#[derive(Debug, Clone, Copy)]
pub struct CacheParams<'k> {
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
pub struct ScaleParams<'k> {
    /// Scales; the address may be 0.
    pub factors: Global<'k, f32>,
    /// Elements between pages.
    pub page: Value<'k, u64>,
    /// Elements between heads.
    pub head: Value<'k, u64>,
    /// The scale of all pages and heads if the address is 0.
    pub factor: Value<'k, f32>,
}

/// All kernel parameters except the variant's; the fields are those of [`AttentionParams`] and [`PlanArrays`].
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the fields are those of `Call` and `PlanArgs`, which say what they are")]
pub struct Params<'k> {
    pub q: RowParams<'k>,
    pub k: CacheParams<'k>,
    pub v: CacheParams<'k>,
    /// The positional part of queries and keys in MLA.
    pub pe: Option<(RowParams<'k>, CacheParams<'k>)>,
    pub o: RowParams<'k>,
    pub lse: Global<'k, f32>,
    pub partial_o: Global<'k, f32>,
    pub partial_lse: Global<'k, f32>,
    pub items: Global<'k, u32>,
    pub worker_indptr: Global<'k, u32>,
    pub feeds: Global<'k, u32>,
    pub merges: Global<'k, u32>,
    pub sources: Global<'k, u32>,
    pub counters: Global<'k, u32>,
    pub requests: Global<'k, u32>,
    pub num_requests: Value<'k, u32>,
    pub indices: Global<'k, u32>,
    /// Address of the mask bits, loaded as bytes.
    pub mask_bits: Value<'k, u64>,
    pub qo_heads: Value<'k, u32>,
    pub group: DivisorValues<'k>,
    pub page_size: DivisorValues<'k>,
    /// [`KvLayout::code`]
    pub layout: Value<'k, u32>,
    pub left: Value<'k, u32>,
    pub right: Value<'k, u32>,
    pub scale: Value<'k, f32>,
    pub k_scale: ScaleParams<'k>,
    pub v_scale: ScaleParams<'k>,
}

impl<'k> Params<'k> {
    /// Declares the parameters, before all others; `mla` kernels have two more tensors.
    #[track_caller]
    pub fn declare(k: &'k Builder, latent: bool) -> Self {
        let _line = k.at_line(std::panic::Location::caller());
        // fields are evaluated in source order
        Self {
            q: RowParams::declare(k, "q"),
            k: CacheParams::declare(k, "k"),
            v: CacheParams::declare(k, "v"),
            pe: latent.then(|| (RowParams::declare(k, "q_pe"), CacheParams::declare(k, "k_pe"))),
            o: RowParams::declare(k, "o"),
            lse: k.global("lse"),
            partial_o: k.global("partial_o"),
            partial_lse: k.global("partial_lse"),
            items: k.global("items"),
            worker_indptr: k.global("worker_indptr"),
            feeds: k.global("feeds"),
            merges: k.global("merges"),
            sources: k.global("sources"),
            counters: k.global("counters"),
            requests: k.global("requests"),
            num_requests: k.param("num_requests"),
            indices: k.global("indices"),
            mask_bits: k.param("mask_bits"),
            qo_heads: k.param("qo_heads"),
            group: DivisorValues::declare(k, "group"),
            page_size: DivisorValues::declare(k, "page_size"),
            layout: k.param("layout"),
            left: k.param("left"),
            right: k.param("right"),
            scale: k.param("scale"),
            k_scale: ScaleParams::declare(k, "k_scale"),
            v_scale: ScaleParams::declare(k, "v_scale"),
        }
    }

    /// Whether the LSE is requested.
    #[track_caller]
    pub fn has_lse(&self) -> Value<'k, bool> {
        is_given(self.lse)
    }

    /// Whether the layout is `layout`.
    #[track_caller]
    pub fn is(&self, layout: KvLayout) -> Value<'k, bool> {
        self.layout.eq(layout.word())
    }
}

impl<'k> RowParams<'k> {
    #[track_caller]
    fn declare(k: &'k Builder, name: &str) -> Self {
        let [address, row, head] = ["", "_row", "_head"].map(|of| k.param(&format!("{name}{of}")));
        Self { address, row, head }
    }
}

impl<'k> CacheParams<'k> {
    #[track_caller]
    fn declare(k: &'k Builder, name: &str) -> Self {
        let [address, page, token, head] =
            ["", "_page", "_token", "_head"].map(|of| k.param(&format!("{name}{of}")));
        Self { address, page, token, head }
    }
}

impl<'k> ScaleParams<'k> {
    #[track_caller]
    fn declare(k: &'k Builder, name: &str) -> Self {
        let factors = k.global(name);
        let [page, head] = ["_page", "_head"].map(|of| k.param(&format!("{name}{of}")));
        let factor = k.param(&format!("{name}_factor"));
        Self { factors, page, head, factor }
    }

    /// Whether there is an array of scales, not one value.
    #[track_caller]
    pub fn is_array(self) -> Value<'k, bool> {
        is_given(self.factors)
    }

    /// The scale of a page and head.
    #[track_caller]
    pub fn at(self, k: &'k Builder, page: Value<'k, u32>, head: Value<'k, u32>) -> Value<'k, f32> {
        let factor = k.var("factor", self.factor);
        k.when(self.is_array(), || {
            let place = page.to_u64() * self.page + head.to_u64() * self.head;
            factor.set(self.factors.at_wide(place).load());
        });
        factor.get()
    }
}

/// Whether an address is not 0.
#[track_caller]
fn is_given(array: Global<'_, f32>) -> Value<'_, bool> {
    let address = array.address();
    (address.low() | address.high()).ne(0)
}

#[cfg(test)]
mod tests {
    use super::{CacheTensor, Call, KvLayout, Params, Pe, PlanArgs, RowTensor, ScaleArgs};
    use tilewright_ptx::{
        build::{Builder, Value},
        ir::ParamKind,
        isa::types::Class,
        sim::{Arg, Launch, Memory},
    };

    /// Parameters that are all different.
    fn call(latent: bool) -> Call {
        let row = |first| RowTensor { address: first, row: first + 1, head: first + 2 };
        let cache =
            |first| CacheTensor { address: first, page: first + 1, token: first + 2, head: first + 3 };
        let scale = |first: u64| ScaleArgs {
            address: first,
            page: first + 1,
            head: first + 2,
            factor: f32::from_bits(first as u32 + 3),
        };
        Call {
            q: row(10),
            k: cache(20),
            v: cache(30),
            pe: latent.then(|| Pe { q: row(40), k: cache(50) }),
            o: row(60),
            lse: 70,
            partial_o: 71,
            partial_lse: 72,
            plan: PlanArgs {
                items: 80,
                worker_indptr: 81,
                feeds: 82,
                merges: 83,
                sources: 84,
                counters: 85,
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
    fn fields<'k>(params: &Params<'k>, variant: Value<'k, u32>) -> Vec<(Value<'k, u32>, u32)> {
        let row = |p: super::RowParams<'k>, first: u32| {
            vec![(p.address.low(), first), (p.row.low(), first + 1), (p.head.low(), first + 2)]
        };
        let cache = |p: super::CacheParams<'k>, first: u32| {
            let [a, b, c, d] = [p.address, p.page, p.token, p.head].map(Value::<u64>::low);
            vec![(a, first), (b, first + 1), (c, first + 2), (d, first + 3)]
        };
        let scale = |p: super::ScaleParams<'k>, first: u32| {
            let [a, b, c] = [p.factors.address(), p.page, p.head].map(Value::<u64>::low);
            vec![(a, first), (b, first + 1), (c, first + 2), (p.factor.reinterpret(), first + 3)]
        };
        let p = params;
        let floats = [(p.lse, 70), (p.partial_o, 71), (p.partial_lse, 72)];
        let arrays = [p.items, p.worker_indptr, p.feeds, p.merges, p.sources, p.counters, p.requests];
        let words = [(p.num_requests, 87), (p.indices.address().low(), 88), (p.mask_bits.low(), 89)];
        let numbers = [(p.qo_heads, 90), (p.group.by, 91), (p.page_size.by, 92), (p.layout, 2)];
        let others = [(p.left, 93), (p.right, 94), (p.scale.reinterpret(), 95), (variant, 120)];
        let latent = p.pe.map(|(q, k)| [row(q, 40), cache(k, 50)].concat());
        [
            [row(p.q, 10), cache(p.k, 20), cache(p.v, 30), row(p.o, 60)].concat(),
            latent.unwrap_or_default(),
            floats.map(|(p, expected)| (p.address().low(), expected)).to_vec(),
            arrays.iter().zip(80..).map(|(p, expected)| (p.address().low(), expected)).collect(),
            [words.to_vec(), numbers.to_vec(), others.to_vec()].concat(),
            [scale(p.k_scale, 100), scale(p.v_scale, 110)].concat(),
        ]
        .concat()
    }

    #[test]
    fn arguments_are_in_the_order_of_parameters() {
        for latent in [false, true] {
            let mut expected = Vec::new();
            let kernel = Builder::kernel("order", 32, |k| {
                let params = Params::declare(k, latent);
                let fields = fields(&params, k.param("variant"));
                let out = k.global::<u32>("out");
                expected = fields.iter().map(|(_, wanted)| *wanted).collect();
                let store = |(at, (found, _)): (usize, (Value<'_, u32>, u32))| out.plus(at).store(found);
                k.when(k.thread().eq(0), || fields.into_iter().enumerate().for_each(store));
            })
            .unwrap();
            let mut memory = Memory::new();
            let out = memory.alloc(4 * expected.len());
            let args = [call(latent).args(), vec![Arg::U64(out)]].concat();
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
