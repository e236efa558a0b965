//! Attention over e4m3, e5m2 and int8 caches with every kind of scale, against the oracle on the true values.

use crate::{Expected, Generator, Lens, PagedRequests, Sample, Storage, Stored, execute_scaled};
use tilewright::{
    Attention, Backend, Dtype, HeadDim, Heads, KvLayout, Mask, Problem, Split, View, Workspace,
    attention::variant::{Alibi, At, Number, Pair, Plain, Variant},
    kv::{KvScales, Scale},
    reference::{attention::Definition, variant as formula},
};

const LENS: [Lens; 6] = [(1, 65), (40, 150), (3, 0), (5, 2), (1, 300), (7, 64)];
/// Shorter requests for slow devices.
const SHORT_LENS: [Lens; 4] = [(1, 65), (9, 70), (3, 0), (5, 2)];
const HEAD_DIMS: [(usize, usize); 6] = [(64, 64), (128, 128), (96, 96), (40, 24), (256, 256), (192, 128)];

fn lens() -> &'static [Lens] {
    if crate::judge::stride() > 1 { &SHORT_LENS } else { &LENS }
}

/// Shifts keys and values, which makes the order of hooks and scales observable.
#[derive(Debug, Clone)]
struct ShiftedKv;

impl Variant for ShiftedKv {
    fn name(&self) -> &str {
        "moved"
    }
    fn key<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        Pair { first: pair.first + at.number(0.5), second: pair.second - at.number(0.25) }
    }
    fn value<N: Number>(&self, at: &At<N>, x: N) -> N {
        x + at.number(0.75)
    }
}

/// The scale kind of a cache.
#[derive(Debug, Clone, Copy)]
enum Scales {
    One,
    Tensor,
    Head,
    /// A tensor of one element.
    TensorValue,
    /// A tensor with one element per head.
    HeadValues,
    Page,
    PageAndHead,
}

/// The scales `[num_pages, num_kv_heads]`; kinds with fewer scales repeat them.
fn factors(kind: Scales, pages: usize, heads: usize, generator: &mut Generator) -> Vec<f32> {
    let mut random = |count: usize| -> Vec<f32> {
        (0..count).map(|_| 0.02 + generator.below(100) as f32 / 300.0).collect()
    };
    match kind {
        Scales::One => vec![1.0; pages * heads],
        Scales::Tensor | Scales::TensorValue => vec![random(1)[0]; pages * heads],
        Scales::Head | Scales::HeadValues => random(heads).into_iter().cycle().take(pages * heads).collect(),
        Scales::Page => random(pages).into_iter().flat_map(|factor| vec![factor; heads]).collect(),
        Scales::PageAndHead => random(pages * heads),
    }
}

fn caches_of_8_bits_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let dtypes = [Dtype::E4m3, Dtype::E5m2, Dtype::I8];
    let kinds = [
        Scales::One,
        Scales::Tensor,
        Scales::Head,
        Scales::TensorValue,
        Scales::HeadValues,
        Scales::Page,
        Scales::PageAndHead,
    ];
    let grid = dtypes.into_iter().flat_map(|dtype| {
        kinds.into_iter().flat_map(move |kind| [1, 5, 16, 64].map(|page| (dtype, kind, page)))
    });
    for (number, (dtype, kind, page_size)) in crate::judge::subset(grid.enumerate()) {
        let group = [1, 3, 4, 7, 8, 16][number % 6];
        let both = [kind, kinds[(number / 4 + number) % 7]];
        let (heads, dim) = (Heads { qo: 2 * group, kv: 2 }, HEAD_DIMS[number / 2 % 6]);
        let problem = Problem::builder(heads, HeadDim { qk: dim.0, vo: dim.1 })
            .dtypes([Dtype::F32, Dtype::Bf16, Dtype::F16][number / 3 % 3], dtype)
            .layout([KvLayout::Nhd, KvLayout::Hnd][number % 2])
            .mask([Mask::Causal, Mask::Full][number / 2 % 2])
            .build()
            .expect("it is sound");
        let sample = Sample::random(problem, lens(), number as u64);
        let stored = Stored::new(&sample, Storage::Paged(page_size), number as u64);
        if number % 3 == 0 {
            judge(backends, (&sample, &stored), both, Plain, &Definition::default);
        } else {
            let slopes: &'static [f64] = Box::leak(formula::alibi_slopes(heads.qo).into_boxed_slice());
            judge(backends, (&sample, &stored), both, Alibi::new(heads.qo), &|| formula::alibi(slopes));
        }
    }
}

/// 16-bit queries, for which a backend may have a separate kernel.
fn queries_of_16_bits_agree_with_the_oracle<B: Backend + Clone>(backends: &[B]) {
    let cases = [
        (Dtype::Bf16, Dtype::E4m3, [Scales::Page, Scales::PageAndHead]),
        (Dtype::F16, Dtype::E4m3, [Scales::PageAndHead, Scales::Head]),
        (Dtype::Bf16, Dtype::E5m2, [Scales::Head, Scales::Page]),
        (Dtype::F16, Dtype::I8, [Scales::Tensor, Scales::PageAndHead]),
        (Dtype::Bf16, Dtype::I8, [Scales::PageAndHead, Scales::Tensor]),
        (Dtype::F16, Dtype::E5m2, [Scales::Page, Scales::Head]),
    ];
    for (number, (qo, kv, kinds)) in cases.into_iter().enumerate() {
        let dim = [(64, 64), (96, 80)][number % 2];
        let problem = Problem::builder(Heads { qo: 4, kv: 2 }, HeadDim { qk: dim.0, vo: dim.1 })
            .dtypes(qo, kv)
            .layout([KvLayout::Nhd, KvLayout::Hnd][number % 2])
            .build()
            .expect("it is sound");
        let sample = Sample::random(problem, lens(), number as u64);
        let stored = Stored::new(&sample, Storage::Paged([16, 5, 64][number % 3]), number as u64);
        judge(backends, (&sample, &stored), kinds, Plain, &Definition::default);
    }
}

/// Ragged tensors accept scales too.
fn ragged_tensors_have_scales_too<B: Backend + Clone>(backends: &[B]) {
    let dtypes = [Dtype::E4m3, Dtype::E5m2, Dtype::I8, Dtype::Bf16];
    for (number, dtype) in dtypes.into_iter().enumerate() {
        let problem = Problem::builder(Heads { qo: 6, kv: 3 }, HeadDim::same(64))
            .dtypes([Dtype::F32, Dtype::Bf16][number % 2], dtype)
            .layout([KvLayout::Nhd, KvLayout::Hnd][number / 2])
            .build()
            .expect("it is sound");
        let sample = Sample::random(problem, lens(), number as u64);
        let stored = Stored::new(&sample, Storage::Ragged, number as u64);
        let kinds = [Scales::One, Scales::Tensor, Scales::Head, Scales::TensorValue, Scales::HeadValues];
        for (at, kind) in kinds.into_iter().enumerate() {
            let both = [kind, kinds[(at + number) % 5]];
            judge(backends, (&sample, &stored), both, Plain, &Definition::default);
        }
    }
}

/// Key and value hooks receive stored values; logit hooks receive scaled logits.
fn scales_come_after_the_hooks_of_keys_and_values<B: Backend + Clone>(backends: &[B]) {
    let dtypes = [Dtype::E4m3, Dtype::E5m2, Dtype::I8, Dtype::F32];
    let kinds = [[Scales::Head, Scales::PageAndHead], [Scales::PageAndHead, Scales::Head]];
    for (number, (dtype, kinds)) in
        dtypes.into_iter().flat_map(|dtype| kinds.map(|kinds| (dtype, kinds))).enumerate()
    {
        let problem = Problem::builder(Heads { qo: 2 * (1 + 3 * (number % 2)), kv: 2 }, HeadDim::same(64))
            .dtypes(Dtype::F32, dtype)
            .build()
            .expect("it is sound");
        let sample = Sample::random(problem, lens(), number as u64);
        let stored = Stored::new(&sample, Storage::Paged(16), number as u64);
        judge(backends, (&sample, &stored), kinds, ShiftedKv, &|| Definition {
            key: Box::new(|_, key| {
                let (first, second) = key.split_at_mut(32);
                first.iter_mut().for_each(|x| *x += 0.5);
                second.iter_mut().for_each(|x| *x -= 0.25);
            }),
            value: Box::new(|_, value| value.iter_mut().for_each(|x| *x += 0.75)),
            ..Definition::default()
        });
    }
}

/// Keys and values have a kind of scale each.
fn judge<B: Backend + Clone, V: Variant + Clone>(
    backends: &[B],
    (sample, stored): (&Sample, &Stored),
    kinds: [Scales; 2],
    variant: V,
    plain: &dyn Fn() -> Definition<'static>,
) {
    let heads = sample.problem.heads().kv;
    let pages = stored.cache().k.shape()[0].max(stored.requests.indices.len());
    let mut generator = Generator::new(7);
    let [k, v] = kinds.map(|kind| factors(kind, pages, heads, &mut generator));
    let PagedRequests { kv_indptr, indices, page_size, .. } = &stored.requests;
    let scale = |kind, factors: &[f32]| match kind {
        Scales::One => Scale::One,
        Scales::Tensor => Scale::Tensor(factors[0]),
        Scales::Head => Scale::Head(factors[..heads].to_vec().leak()),
        Scales::TensorValue => values(factors, 1, 1),
        Scales::HeadValues => {
            // with a NaN after each
            let spread: Vec<f32> = factors[..heads].iter().flat_map(|factor| [*factor, f32::NAN]).collect();
            values(&spread, heads, 2)
        }
        Scales::Page => per_page(factors, &[pages], [heads, 1]),
        Scales::PageAndHead if page_size % 2 == 0 => per_page(factors, &[pages, heads], [heads, 1]),
        Scales::PageAndHead => {
            // one scale per head, with a NaN after each
            let of_head = |h: usize| factors[h..].iter().step_by(heads).copied().chain([f32::NAN]);
            let by_head: Vec<f32> = (0..heads).flat_map(of_head).collect();
            per_page(&by_head, &[pages, heads], [1, pages + 1])
        }
    };
    let scales = KvScales { k: scale(kinds[0], &k), v: scale(kinds[1], &v) };
    let of = |factors: &[f32], r: usize, j: usize, g: usize| {
        let page = indices[kv_indptr[r] as usize + j / page_size] as usize;
        f64::from(factors[page * heads + g])
    };
    let definition = |r| {
        let (k, v) = (k.clone(), v.clone());
        let definition = plain();
        let (on_key, on_value) = (definition.key, definition.value);
        Definition {
            // hooks apply to stored values, and scales to their results
            key: Box::new(move |at, key| {
                on_key(at, key);
                key.iter_mut().for_each(|x| *x *= of(&k, r, at.j, at.g));
            }),
            value: Box::new(move |at, value| {
                on_value(at, value);
                value.iter_mut().for_each(|x| *x *= of(&v, r, at.j, at.g));
            }),
            ..definition
        }
    };
    let expected = Expected::scaled(sample, &definition, &|r, at| of(&v, r, at.j, at.g));
    for (backend, split) in
        backends.iter().flat_map(|b| [Split::Balanced, Split::Fixed { tokens: 64 }].map(|s| (b, s)))
    {
        let attention =
            Attention::with_variant(sample.problem, variant.clone(), backend.clone()).expect("it can");
        let plan = attention.plan_with(&stored.batch(), split).expect("the batch is sound");
        let cache = (sample, stored.cache(), scales);
        let outcome = execute_scaled(&attention, &plan, cache, &mut Workspace::default());
        expected.assert(backend, &outcome, format_args!("{}, {kinds:?}, page {page_size}", sample.problem));
    }
}

/// A tensor of `count` scales.
fn values(factors: &[f32], count: usize, stride: usize) -> Scale<'static> {
    let factors: &'static [f32] = factors.to_vec().leak();
    Scale::Values(View::strided(factors, &[count], &[stride]).expect("it is there"))
}

/// A view of per-page scales with a stride between pages.
fn per_page(factors: &[f32], shape: &[usize], strides: [usize; 2]) -> Scale<'static> {
    let factors: &'static [f32] = factors.to_vec().leak();
    Scale::Page(View::strided(factors, shape, &strides[..shape.len()]).expect("it is there"))
}

crate::judge_backends!(
    caches_of_8_bits_agree_with_the_oracle,
    queries_of_16_bits_agree_with_the_oracle,
    ragged_tensors_have_scales_too,
    scales_come_after_the_hooks_of_keys_and_values
);
crate::judge_bodies!(
    caches_of_8_bits_agree_with_the_oracle,
    queries_of_16_bits_agree_with_the_oracle,
    ragged_tensors_have_scales_too
);
