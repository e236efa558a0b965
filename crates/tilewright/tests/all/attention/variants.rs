//! Every shipped variant, a custom one, and each one's recorded form in full attention against the oracle.

use crate::{Expected, Lens, Outcome, Sample, Storage, Stored, execute_bound, run_batch};
use tilewright::{
    Attention, Backend, Dtype, HeadDim, Heads, KvLayout, Mask, Problem, View, Workspace,
    attention::{
        Split, Variant,
        variant::{
            Alibi, At, AttentionSinks, Both, DocumentMask, DumpLogits, ExpressionVariant, FlashSigmoid,
            HeadScales, MultiItemScoring, Number, Pair, Plain, PrefixLm, RelativePositionBias,
            RotaryEmbedding, SoftCap,
        },
    },
    reference::{
        attention::{Definition, LogitIndex},
        rope::{frequency, llama31_frequency},
        variant as formula,
    },
    rope::{Rope, RopeScaling},
};

const LENS: [Lens; 7] = [(1, 65), (40, 150), (3, 0), (5, 2), (1, 1), (0, 9), (66, 66)];
const SPLITS: [Split; 3] = [Split::Balanced, Split::Fixed { tokens: 64 }, Split::Never];
const MASKS: [Mask; 3] = [Mask::Causal, Mask::Full, Mask::Window { left: 50, right: Some(0) }];
const GROUPS: [usize; 6] = [1, 3, 4, 7, 8, 16];
const HEAD_DIMS: [usize; 5] = [32, 64, 96, 128, 256];

/// Compares a variant with its definition, and its recorded form bit for bit with the hooks.
fn judge<'a, B: Backend + Clone, V: Variant + Clone>(
    backends: &[B],
    masks: &[Mask],
    variant: impl Fn(Heads) -> V,
    definition: impl Fn(Heads, usize) -> Definition<'a>,
) {
    let cases = masks.iter().flat_map(|&mask| GROUPS.map(|group| (mask, group)));
    for (number, (mask, group)) in crate::judge::subset(cases.enumerate()) {
        let heads = Heads { qo: 2 * group, kv: 2 };
        let (qo, kv) =
            [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::F16, Dtype::F32)][number % 3];
        let problem = Problem::builder(heads, HeadDim::same(HEAD_DIMS[number % 5]))
            .dtypes(qo, kv)
            .layout([KvLayout::Nhd, KvLayout::Hnd][number % 2])
            .mask(mask)
            .build()
            .expect("it is sound");
        let sample = Sample::random(problem, &LENS, number as u64);
        let storage = [Storage::Paged(1), Storage::Paged(5), Storage::Ragged, Storage::Paged(64)][number % 4];
        let stored = Stored::new(&sample, storage, number as u64);
        let expected = Expected::by(&sample, &|r| definition(heads, r));
        let (split, variant) = (SPLITS[number % 3], variant(heads));
        for backend in backends {
            let outcome = run(backend, (&sample, &stored), variant.clone(), split);
            let name = variant.name();
            expected.assert(backend, &outcome, format_args!("{name}, {problem}, {split:?}"));
            let recorded = ExpressionVariant::of(&variant).expect("it can be recorded");
            let again = run(backend, (&sample, &stored), recorded, split);
            assert_eq!(
                again.bits(),
                outcome.bits(),
                "{}: {name} as an expression, {problem}",
                backend.describe()
            );
        }
    }
}

fn run<B: Backend + Clone>(
    backend: &B,
    (sample, stored): (&Sample, &Stored),
    variant: impl Variant,
    split: Split,
) -> Outcome {
    let inputs = (sample, &stored.batch(), stored.cache());
    run_batch((backend, variant), inputs, split, &mut Workspace::default())
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

fn each_head(count: usize, f: impl Fn(f32) -> f32) -> Vec<f32> {
    (0..count).map(|h| f(h as f32)).collect()
}

/// A definition that owns its captured data.
fn owning<T: 'static>(
    data: T,
    definition: impl Fn(&'static T) -> Definition<'static>,
) -> Definition<'static> {
    definition(Box::leak(Box::new(data)))
}

fn soft_cap<B: Backend + Clone>(backends: &[B]) {
    judge(backends, &MASKS, |_| SoftCap::new(3.0).expect("it is above 0"), |_, _| formula::soft_cap(3.0));
}

fn alibi<B: Backend + Clone>(backends: &[B]) {
    let definition =
        |heads: Heads, _| owning(formula::alibi_slopes(heads.qo), |slopes| formula::alibi(slopes));
    judge(backends, &MASKS, |heads| Alibi::new(heads.qo), definition);
}

fn alibi_with_soft_cap<B: Backend + Clone>(backends: &[B]) {
    let variant = |heads: Heads| Both::new(Alibi::new(heads.qo), SoftCap::new(20.0).expect("it is above 0"));
    let definition = |heads: Heads, _| {
        let logit = |slopes: &'static Vec<f64>| {
            let logit = move |at: LogitIndex, s: f64| {
                20.0 * ((s + slopes[at.h] * (at.j as f64 - at.p as f64)) / 20.0).tanh()
            };
            Definition { logit: Box::new(logit), ..Definition::default() }
        };
        owning(formula::alibi_slopes(heads.qo), logit)
    };
    judge(backends, &MASKS[..2], variant, definition);
}

fn attention_sinks<B: Backend + Clone>(backends: &[B]) {
    let sinks = |heads: Heads| each_head(heads.qo, |h| 2.0 - h);
    let definition = |heads: Heads, _| owning(wide(&sinks(heads)), |sinks| formula::attention_sinks(sinks));
    judge(backends, &MASKS, |heads| AttentionSinks::new(sinks(heads)).expect("they are finite"), definition);
}

/// Runs with bound tables give the bits of a variant with their values, and each run reads its own.
fn bound_tables<B: Backend + Clone>(backends: &[B]) {
    let heads = Heads { qo: 6, kv: 2 };
    let problem = Problem::builder(heads, HeadDim::same(64)).build().expect("it is sound");
    let sample = Sample::random(problem, &LENS, 4);
    let stored = Stored::new(&sample, Storage::Paged(16), 4);
    let slopes = Alibi::slopes(heads.qo);
    let bound = Both::new(Alibi::bound(heads.qo), AttentionSinks::bound(heads.qo));
    for backend in backends {
        let attention =
            Attention::with_variant(problem, bound.clone(), backend.clone()).expect("it is sound");
        let plan = attention.plan(&stored.batch()).expect("the batch is sound");
        for first in [2.0, -1.0] {
            let sinks = each_head(heads.qo, |h| first - h);
            let with_values = AttentionSinks::new(sinks.clone()).expect("they are finite");
            let with_values = Both::new(Alibi::new(heads.qo), with_values);
            let expected = run(backend, (&sample, &stored), with_values, Split::Balanced);
            let view = |values| View::new(values, &[heads.qo]).expect("a view");
            let tables = [("sinks", view(&sinks[..])), ("slopes", view(&slopes[..]))];
            let outcome = execute_bound(&attention, &plan, (&sample, stored.cache(), &tables));
            assert_eq!(outcome.bits(), expected.bits(), "{}: {first}", backend.describe());
        }
    }
}

fn flash_sigmoid<B: Backend + Clone>(backends: &[B]) {
    judge(backends, &MASKS, |_| FlashSigmoid::new(-1.5), |_, _| formula::flash_sigmoid(-1.5));
}

fn rotary_embedding<B: Backend + Clone>(backends: &[B]) {
    // head_dim differs between cases, and so do the frequencies
    for (scaling, dim) in [(RopeScaling::None, 64), (llama31(), 128)] {
        let heads = Heads { qo: 6, kv: 2 };
        for (number, mask) in crate::judge::subset(MASKS.into_iter().enumerate()) {
            let problem =
                Problem::builder(heads, HeadDim::same(dim)).mask(mask).build().expect("it is sound");
            let rope = Rope::new(dim, 5e5).and_then(|rope| rope.with_scaling(scaling)).expect("it is sound");
            let frequencies: Vec<f64> = (0..dim / 2)
                .map(|i| match scaling {
                    RopeScaling::None => frequency(i, dim, 5e5),
                    _ => llama31_frequency(frequency(i, dim, 5e5), (8.0, 1.0, 4.0), 8192.0),
                })
                .collect();
            let sample = Sample::random(problem, &LENS, number as u64);
            let stored = Stored::new(&sample, Storage::Paged(5), 1);
            let expected = Expected::by(&sample, &|_| formula::rotary_embedding(&frequencies));
            for backend in backends {
                let variant = RotaryEmbedding::new(&rope).expect("the rope is sound");
                let outcome = run(backend, (&sample, &stored), variant, SPLITS[number]);
                expected.assert(backend, &outcome, format_args!("{problem}"));
            }
        }
    }
}

fn llama31() -> RopeScaling {
    RopeScaling::Llama31 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 }
}

fn relative_position_bias<B: Backend + Clone>(backends: &[B]) {
    let table = |heads: Heads| each_head(heads.qo * 21, |at| (at * 0.7).sin());
    let variant = |heads: Heads| RelativePositionBias::new(table(heads), 10).expect("the table fits");
    let definition =
        |heads: Heads, _| owning(wide(&table(heads)), |table| formula::relative_position_bias(table, 10));
    judge(backends, &MASKS, variant, definition);
}

fn head_scales<B: Backend + Clone>(backends: &[B]) {
    let scales =
        |heads: Heads| (each_head(heads.qo, |h| 0.5 + 0.1 * h), each_head(heads.qo, |h| 2.0 - 0.3 * h));
    let variant = |heads: Heads| HeadScales::new(scales(heads).0, scales(heads).1);
    let definition = |heads: Heads, _| {
        let (qk, vo) = scales(heads);
        owning((wide(&qk), wide(&vo)), |(qk, vo)| formula::head_scales(qk, vo))
    };
    judge(backends, &MASKS, variant, definition);
}

fn prefix_lm<B: Backend + Clone>(backends: &[B]) {
    let prefixes = [3, 100, 1, 7, 0, 4, 66];
    let variant = |_| PrefixLm::new(&prefixes).expect("they are small");
    judge(backends, &[Mask::Full], variant, |_, r| formula::prefix_lm(prefixes[r] as usize));
}

fn document_mask<B: Backend + Clone>(backends: &[B]) {
    // documents of 1, 2, 3, ... tokens; every third reappears at the end
    let documents: Vec<Vec<u32>> = LENS
        .iter()
        .map(|lens| (0..lens.1).map(|at| ((2.0 * at as f32).sqrt() as u32) % 7).collect())
        .collect();
    let variant = |_| DocumentMask::new(&documents).expect("the ids are small");
    let definition =
        |_, r: usize| owning(documents[r].clone(), |documents| formula::document_mask(documents));
    judge(backends, &MASKS, variant, definition);
}

fn multi_item_scoring<B: Backend + Clone>(backends: &[B]) {
    let prefixes = [60, 100, 0, 0, 1, 9, 10];
    // items of 6 tokens, each after a delimiter
    let places: Vec<Vec<u32>> = LENS
        .iter()
        .zip(prefixes)
        .map(|(lens, prefix)| (0..lens.1.saturating_sub(prefix as usize) as u32).map(|at| at % 7).collect())
        .collect();
    let variant = |_| MultiItemScoring::new(&prefixes, &places).expect("they are small");
    let definition = |_, r: usize| {
        owning(places[r].clone(), |places| formula::multi_item_scoring(prefixes[r] as usize, places))
    };
    judge(backends, &[Mask::Full, Mask::Causal], variant, definition);
}

/// A variant that implements every hook, to test where attention calls each.
#[derive(Debug, Clone)]
struct AllHooks {
    table: Vec<f32>,
}

impl Variant for AllHooks {
    fn name(&self) -> &str {
        "everything"
    }
    fn query<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let factor = at.number(1.0) + at.request() * at.number(0.1) - at.dim() * at.number(0.005);
        Pair { first: pair.second * factor, second: pair.first }
    }
    fn key<N: Number>(&self, at: &At<N>, pair: Pair<N>) -> Pair<N> {
        let factor = at.number(1.0) - at.kv_head() * at.number(0.25) + at.kv() * at.number(0.001);
        Pair { first: pair.first * factor, second: pair.second + at.dim() * at.number(0.01) }
    }
    fn value<N: Number>(&self, at: &At<N>, x: N) -> N {
        x + at.dim() * at.number(0.03) - at.kv() * at.number(0.002) + at.kv_head()
    }
    fn logits<N: Number>(&self, at: &At<N>, logit: N) -> N {
        logit + at.read("table", &self.table, at.kv() - at.qo_head())
    }
    fn mask<N: Number>(&self, at: &At<N>) -> N::Bool {
        let third = (at.kv() / at.number(3.0)).floor() * at.number(3.0);
        !third.eq(at.kv())
    }
    fn update<N: Number>(&self, at: &At<N>, max: N, sum: N) -> (N, N) {
        (max, sum * (at.number(1.5) + at.kv_head()))
    }
    fn output<N: Number>(&self, at: &At<N>, o: N) -> N {
        o * o + at.dim() * at.number(0.1) - at.qo_head()
    }
}

fn every_hook_is_called<B: Backend + Clone>(backends: &[B]) {
    let table = vec![0.5, -0.25, 1.0, 0.0, 2.0];
    let wide = wide(&table);
    // more than one part of 32 dims
    let problem = Problem::builder(Heads { qo: 6, kv: 2 }, HeadDim::same(40)).build().expect("it is sound");
    let sample = Sample::random(problem, &LENS, 4);
    let halves = |row: &mut [f64], f: &dyn Fn(usize, f64, f64) -> (f64, f64)| {
        let half = row.len() / 2;
        for i in 0..half {
            (row[i], row[half + i]) = f(i, row[i], row[half + i]);
        }
    };
    let definition = |r: usize| Definition {
        query: Box::new(move |_, q| halves(q, &|i, a, b| (b * (1.0 + r as f64 * 0.1 - i as f64 * 0.005), a))),
        key: Box::new(move |at, k| {
            let factor = 1.0 - at.g as f64 * 0.25 + at.j as f64 * 0.001;
            halves(k, &|i, a, b| (a * factor, b + i as f64 * 0.01));
        }),
        value: Box::new(|at, v| {
            let shift = |i: usize| i as f64 * 0.03 - at.j as f64 * 0.002 + at.g as f64;
            v.iter_mut().enumerate().for_each(|(i, v)| *v += shift(i));
        }),
        logit: Box::new(|at, s| s + wide[(at.j as i64 - at.h as i64).clamp(0, 4) as usize]),
        visible: Box::new(|at| at.j % 3 != 0),
        output: Box::new(|at, o| {
            // `update` scales the state's sum before normalization
            let factor = 1.5 + at.g as f64;
            let output =
                |(i, o): (usize, &mut f64)| *o = (*o / factor).powi(2) + i as f64 * 0.1 - at.h as f64;
            o.iter_mut().enumerate().for_each(output);
        }),
        ..Definition::default()
    };
    let mut expected = Expected::by(&sample, &definition);
    // scaling the sum by a factor adds its logarithm to the LSE
    expected.shift_lse(|head| (1.5 + (head / 3) as f64).log2());
    for (backend, storage) in
        backends.iter().flat_map(|b| [Storage::Paged(5), Storage::Ragged].map(|s| (b, s)))
    {
        let stored = Stored::new(&sample, storage, 2);
        for split in SPLITS {
            let outcome = run(backend, (&sample, &stored), AllHooks { table: table.clone() }, split);
            expected.assert(backend, &outcome, format_args!("{split:?}"));
        }
    }
}

fn dumped_logits_are_those_of_attention<B: Backend + Clone>(backends: &[B]) {
    let heads = Heads { qo: 6, kv: 2 };
    let problem = Problem::builder(heads, HeadDim::same(64)).build().expect("it is sound");
    let sample = Sample::random(problem, &LENS, 8);
    let stored = Stored::new(&sample, Storage::Paged(16), 2);
    let (r, (qo_len, kv_len)) = (1, LENS[1]);
    for backend in backends {
        let dump = DumpLogits::new(r as u32, heads.qo, (qo_len as u32, kv_len as u32)).expect("they are few");
        let plain = run(backend, (&sample, &stored), Plain, Split::Fixed { tokens: 64 });
        let outcome = run(backend, (&sample, &stored), dump.clone(), Split::Fixed { tokens: 64 });
        // the scale is applied before the hook, not in the softmax
        let most = plain.o.iter().zip(&outcome.o).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 1e-5, "{}: dumping changes attention by {most}", backend.describe());
        let logits = dump.logits().values();
        for (i, h, j) in
            (0..qo_len).flat_map(|i| (0..6).flat_map(move |h| (0..kv_len).map(move |j| (i, h, j))))
        {
            let q = &sample.q[((sample.first_row(r) + i) * 6 + h) * 64..][..64];
            let k = &sample.k[r][(j * 2 + h / 3) * 64..][..64];
            let want = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() / 8.0;
            let got = f64::from(logits[(h * qo_len + i) * kv_len + j]);
            // tiles that are masked for all rows of the strip are skipped
            if j + qo_len <= kv_len + i {
                assert!(
                    (got - want).abs() < 1e-4,
                    "{}: row {i}, head {h}, key {j}: {got}, not {want}",
                    backend.describe()
                );
            }
        }
    }
}

crate::judge_backends!(
    soft_cap,
    alibi,
    alibi_with_soft_cap,
    attention_sinks,
    bound_tables,
    flash_sigmoid,
    rotary_embedding,
    relative_position_bias,
    head_scales,
    prefix_lm,
    document_mask,
    multi_item_scoring,
    every_hook_is_called,
    dumped_logits_are_those_of_attention
);
