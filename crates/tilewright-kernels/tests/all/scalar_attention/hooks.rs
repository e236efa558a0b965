//! Every hook in full attention, against the oracle: each shipped variant, and one with all hooks.

use super::{
    judge::Expected,
    run::Case,
    sample::{Lens, Sample},
    schedule::Cut,
    shapes::CUTS,
    storage::{Storage, Stored},
};
use tilewright::{
    Dtype, HeadDim, Heads, KvLayout, Mask, Problem,
    attention::variant::{
        Alibi, AttentionSinks, DocumentMask, DumpLogits, ExpressionVariant, FlashSigmoid, HeadScales,
        MultiItemScoring, RelativePositionBias, RotaryEmbedding, SoftCap, Variant,
    },
    reference::{
        attention::{Definition, LogitIndex},
        rope::frequency,
        variant as formula,
    },
    rope::Rope,
};
use tilewright_kernels::attention::body::simt::{SimtConfig, attention};

const LENS: [Lens; 5] = [(1, 65), (9, 90), (3, 0), (2, 1), (0, 9)];
const MASKS: [Mask; 3] = [Mask::Causal, Mask::Full, Mask::Window { left: 50, right: Some(0) }];
const HEADS: Heads = Heads { qo: 6, kv: 2 };
/// More than one part of 32 dims.
const DIM: usize = 40;

fn problem(number: usize) -> Problem {
    let (qo, kv) =
        [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::F16), (Dtype::F16, Dtype::F32)][number % 3];
    Problem::builder(HEADS, HeadDim::same(DIM))
        .dtypes(qo, kv)
        .layout([KvLayout::Nhd, KvLayout::Hnd][number % 2])
        .mask(MASKS[number % 3])
        .build()
        .expect("it is sound")
}

fn judge<'a>(variant: &impl Variant, definition: impl Fn(usize) -> Definition<'a>) {
    judge_recorded(&ExpressionVariant::of(variant).expect("it can be recorded"), definition, |_| {});
}

fn judge_recorded<'a>(
    variant: &ExpressionVariant,
    definition: impl Fn(usize) -> Definition<'a>,
    change: impl Fn(&mut Expected),
) {
    for number in 0..3 {
        let sample = Sample::random(problem(number), &LENS, number as u64);
        let storage = [Storage::Paged(5), Storage::Ragged, Storage::Paged(64)][number];
        let stored = Stored::new(&sample, storage, 1);
        let mut expected = Expected::by(&sample, &definition);
        change(&mut expected);
        let outcome = Case::new((&sample, &stored, storage), variant, CUTS[number]).run();
        expected.check(&outcome).unwrap_or_else(|why| {
            panic!("{}, {}, {:?}: {why}", variant.name(), sample.problem, CUTS[number])
        });
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

fn each_head(count: usize, f: impl Fn(f32) -> f32) -> Vec<f32> {
    (0..count).map(|h| f(h as f32)).collect()
}

#[test]
fn logits_hooks() {
    judge(&SoftCap::new(3.0).expect("it is above 0"), |_| formula::soft_cap(3.0));
    let slopes = formula::alibi_slopes(6);
    judge(&Alibi::new(6), |_| formula::alibi(&slopes));
    let table = each_head(6 * 21, |at| (at * 0.7).sin());
    let wide_table = wide(&table);
    let bias = RelativePositionBias::new(table, 10).expect("the table fits");
    judge(&bias, |_| formula::relative_position_bias(&wide_table, 10));
}

#[test]
fn outputs_and_states() {
    // some are far above the logits, some far below
    let sinks = each_head(6, |h| 8.0 - 4.0 * h);
    let wide_sinks = wide(&sinks);
    judge(&AttentionSinks::new(sinks).expect("they are finite"), |_| formula::attention_sinks(&wide_sinks));
    let (qk, vo) = (each_head(6, |h| 0.5 + 0.1 * h), each_head(6, |h| 2.0 - 0.3 * h));
    let (wide_qk, wide_vo) = (wide(&qk), wide(&vo));
    judge(&HeadScales::new(qk, vo), |_| formula::head_scales(&wide_qk, &wide_vo));
}

#[test]
fn without_softmax() {
    judge(&FlashSigmoid::new(-1.5), |_| formula::flash_sigmoid(-1.5));
}

#[test]
fn rotation() {
    let frequencies: Vec<f64> = (0..DIM / 2).map(|i| frequency(i, DIM, 5e5)).collect();
    let rope = Rope::new(DIM, 5e5).expect("it is sound");
    let variant = RotaryEmbedding::new(&rope).expect("it is sound");
    judge(&variant, |_| formula::rotary_embedding(&frequencies));
}

#[test]
fn masks() {
    let documents: Vec<Vec<u32>> = LENS
        .iter()
        .map(|lens| (0..lens.1).map(|at| ((2.0 * at as f32).sqrt() as u32) % 7).collect())
        .collect();
    let variant = DocumentMask::new(&documents).expect("the ids are small");
    judge(&variant, |r| formula::document_mask(&documents[r]));
    let prefixes = [60, 30, 0, 0, 1];
    let places: Vec<Vec<u32>> = LENS
        .iter()
        .zip(prefixes)
        .map(|(lens, prefix)| (0..lens.1.saturating_sub(prefix as usize) as u32).map(|at| at % 7).collect())
        .collect();
    let variant = MultiItemScoring::new(&prefixes, &places).expect("they are small");
    judge(&variant, |r| formula::multi_item_scoring(prefixes[r] as usize, &places[r]));
}

/// A variant with every hook and every input.
const EVERYTHING: &str = r#"{
    "name": "everything", "tables": {"t": [0.5, -0.25, 1, 0, 2]},
    "query": {"let": [["f", {"sub": [{"add": [1, {"mul": ["request", 0.1]}]}, {"mul": ["dim", 0.005]}]}]],
              "in": [{"mul": ["second", "f"]}, "first"]},
    "key": {"let": [["f", {"add": [{"sub": [1, {"mul": ["kv_head", 0.25]}]}, {"mul": ["kv", 0.001]}]}]],
            "in": [{"mul": ["first", "f"]}, {"add": ["second", {"mul": ["dim", 0.01]}]}]},
    "value": {"add": [{"sub": [{"add": ["x", {"mul": ["dim", 0.03]}]}, {"mul": ["kv", 0.002]}]}, "kv_head"]},
    "logits": {"add": ["logit", {"read": ["t", {"sub": ["kv", "qo_head"]}]}]},
    "mask": {"not": {"eq": [{"mul": [{"floor": {"div": ["kv", 3]}}, 3]}, "kv"]}},
    "update": ["max", {"mul": ["sum", {"add": [1.5, "kv_head"]}]}],
    "output": {"sub": [{"add": [{"mul": ["o", "o"]}, {"mul": ["dim", 0.1]}]}, "qo_head"]}
}"#;

fn halves(row: &mut [f64], f: impl Fn(usize, f64, f64) -> (f64, f64)) {
    let half = row.len() / 2;
    for i in 0..half {
        (row[i], row[half + i]) = f(i, row[i], row[half + i]);
    }
}

#[test]
fn every_hook_at_once() {
    let table = [0.5, -0.25, 1.0, 0.0, 2.0];
    let definition = |r: usize| Definition {
        query: Box::new(move |_, q| halves(q, |i, a, b| (b * (1.0 + r as f64 * 0.1 - i as f64 * 0.005), a))),
        key: Box::new(|at, k| {
            let factor = 1.0 - at.g as f64 * 0.25 + at.j as f64 * 0.001;
            halves(k, |i, a, b| (a * factor, b + i as f64 * 0.01));
        }),
        value: Box::new(|at, v| {
            let shift = |i: usize| i as f64 * 0.03 - at.j as f64 * 0.002 + at.g as f64;
            v.iter_mut().enumerate().for_each(|(i, v)| *v += shift(i));
        }),
        logit: Box::new(move |at, s| s + table[(at.j as i64 - at.h as i64).clamp(0, 4) as usize]),
        visible: Box::new(|at: LogitIndex| !at.j.is_multiple_of(3)),
        output: Box::new(|at, o| {
            // the state hook increases the sum before the output is normalized
            let factor = 1.5 + at.g as f64;
            let output =
                |(i, o): (usize, &mut f64)| *o = (*o / factor).powi(2) + i as f64 * 0.1 - at.h as f64;
            o.iter_mut().enumerate().for_each(output);
        }),
        ..Definition::default()
    };
    let variant = ExpressionVariant::from_json(EVERYTHING).unwrap_or_else(|why| panic!("{why}"));
    // a factor on the sum adds its logarithm to the LSE
    judge_recorded(&variant, definition, |expected| {
        expected.shift_lse(|head| (1.5 + (head / 3) as f64).log2());
    });
}

#[test]
fn dumped_logits_are_those_of_attention() {
    let sample = Sample::random(problem(0), &LENS, 8);
    let (r, (qo_len, kv_len)) = (1, LENS[1]);
    let dump = DumpLogits::new(r as u32, 6, (qo_len as u32, kv_len as u32)).expect("they are few");
    let variant = ExpressionVariant::of(&dump).expect("it can be recorded");
    let stored = Stored::new(&sample, Storage::Paged(16), 2);
    let cut = Cut { rows: 16, keys: 64, workers: 3 };
    let logits = Case::new((&sample, &stored, Storage::Paged(16)), &variant, cut).run_for_buffer();
    for (i, h, j) in (0..qo_len).flat_map(|i| (0..6).flat_map(move |h| (0..kv_len).map(move |j| (i, h, j)))) {
        let q = &sample.q[((sample.first_row(r) + i) * 6 + h) * DIM..][..DIM];
        let k = &sample.k[r][(j * 2 + h / 3) * DIM..][..DIM];
        let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let got = f64::from(logits[(h * qo_len + i) * kv_len + j]);
        let seen = j <= kv_len - qo_len + i;
        let near = (got - dot / (DIM as f64).sqrt()).abs() < 1e-5;
        assert!(near || !seen && got.is_nan(), "row {i}, head {h}, key {j}: {got} is not {dot} / sqrt {DIM}");
    }
}

#[test]
fn rejects_unsupported_hooks() {
    let rope = Rope::new(DIM, 1e4).and_then(|rope| RotaryEmbedding::new(&rope)).expect("it is sound");
    let rope = ExpressionVariant::of(&rope).expect("it can be recorded");
    let refused = |dtype_o, head_dim, latent| {
        let config = SimtConfig { dtype_q: dtype_o, dtype_o, dtype_kv: Dtype::I8, head_dim, mla: latent };
        attention("attend", config, &rope).expect_err("refused").to_string()
    };
    assert_eq!(
        refused(Dtype::E5m2, (1025, 0), false),
        "kernel attend: o dtype = e5m2, expected f32, f16, bf16 or e4m3; head_dim.qk = 1025, expected 1..=1024; \
         head_dim.vo = 0, expected 1..=1024; head_dim.qk = 1025, expected an even one: a hook needs pairs"
    );
    assert_eq!(
        refused(Dtype::F32, (64, 64), true),
        "kernel attend: head_dim = 64/64 latent, expected more for keys than for values"
    );
}
