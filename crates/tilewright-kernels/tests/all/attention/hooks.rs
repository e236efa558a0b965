//! Variant hooks in decode, prefill, split requests, cascades and blocks; refused variants.

use super::{CAUSAL, Case, FULL, check, judge::check_with};
use tilewright::{
    Dtype, HeadDim,
    attention::variant::{
        Alibi, AttentionSinks, Both, DocumentMask, ExpressionVariant, FlashSigmoid, HeadScales,
        MultiItemScoring, PrefixLm, RelativePositionBias, RotaryEmbedding, SoftCap, Variant,
    },
    reference::{
        attention::{Definition, LogitIndex},
        variant as formula,
    },
    rope::Rope,
};
use tilewright_kernels::attention::{
    Body, KvLayout,
    body::{Bodies, mma::unsupported_variant},
};

/// Cases with four query heads: few and many rows, one and several items, one and all requests, keys with gaps.
fn cases() -> Vec<Case> {
    let mixed = Case::new(32, (4, 2), &[(1, 100), (3, 90), (40, 100), (2, 0)]);
    let level = Case::new(32, (4, 1), &[(1, 100), (3, 90), (20, 128)]);
    let few = Case::new(32, (4, 2), &[(1, 100), (3, 90), (2, 75)]);
    let blocks = Case::new(32, (4, 2), &[(1, 80), (30, 70)]);
    let wgmma = |case: &mut Case| (case.dim, case.body) = (HeadDim::same(64), Body::Wgmma);
    vec![
        mixed.clone().with(wgmma),
        blocks.clone().with(wgmma).with(|case| (case.layout, case.page_size) = (KvLayout::Blocks, 4)),
        level.clone().with(wgmma).with(|case| (case.prefix, case.piece) = (70, 128)),
        mixed.clone().with(|case| case.seeds = 2),
        mixed.with(|case| (case.piece, case.workers, case.mask) = (64, 3, FULL)),
        level.with(|case| (case.prefix, case.piece, case.workers) = (70, 64, 3)),
        few.with(|case| (case.prefix, case.piece, case.workers) = (70, 64, 3)),
        blocks.with(|case| (case.layout, case.page_size, case.mask) = (KvLayout::Blocks, 4, CAUSAL)),
    ]
}

fn recorded(variant: &impl Variant) -> ExpressionVariant {
    ExpressionVariant::of(variant).expect("it can be recorded")
}

fn parsed(json: &str) -> ExpressionVariant {
    ExpressionVariant::from_json(json).unwrap_or_else(|why| panic!("{why}"))
}

fn check_all<'a>(variant: &impl Variant, definition: &dyn Fn(usize) -> Definition<'a>) {
    cases().iter().for_each(|case| check_with(case, &recorded(variant), definition));
}

fn each_head(count: usize, f: impl Fn(f32) -> f32) -> Vec<f32> {
    (0..count).map(|h| f(h as f32)).collect()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

#[test]
fn capped_logits() {
    let large = Case::new(128, (1, 1), &[(1, 90), (130, 140)]);
    let cap = recorded(&SoftCap::new(0.5).expect("it is above 0"));
    check_with(&large, &cap, &|_| formula::soft_cap(0.5));
    check_all(&SoftCap::new(0.5).expect("it is above 0"), &|_| formula::soft_cap(0.5));
}

/// Biases that grow evenly from key to key. Tiles are processed from the last to the first, so maxima move where a bias falls.
#[test]
fn biases_of_whole_tiles() {
    let case = Case::new(128, (2, 1), &[(130, 700), (9, 300)])
        .with(|case| (case.body, case.mask) = (Body::Wgmma, FULL));
    let slopes = formula::alibi_slopes(2);
    let alibi = |at: LogitIndex, s: f64| s + slopes[at.h] * (at.j as f64 - at.p as f64);
    let definition = || Definition { logit: Box::new(alibi), ..Definition::default() };
    check_with(&case, &recorded(&Alibi::new(2)), &|_| definition());
    // a factor of -1 makes the scale of the logits negative
    for (query_factor, kv, mask, step) in
        [(1.0, Dtype::Bf16, FULL, -1.5), (-1.0, Dtype::Bf16, FULL, -1.5), (1.0, Dtype::E4m3, CAUSAL, 0.03)]
    {
        let case = Case::new(128, (2, 1), &[(70, 600)]).with(|case| (case.body, case.kv) = (Body::Wgmma, kv));
        let case = case.with(|case| (case.query_factor, case.mask) = (query_factor, mask));
        let bias = format!(r#"{{"mul": [{{"add": ["qo_head", "kv"]}}, {step}]}}"#);
        let json = format!(r#"{{"name": "line", "logits": {{"add": ["logit", {bias}]}}}}"#);
        let variant = parsed(&json);
        let logit = move |at: LogitIndex, s: f64| s + step * (at.j as f64 + at.h as f64);
        check_with(&case, &variant, &|_| Definition { logit: Box::new(logit), ..Definition::default() });
    }
}

/// Caps that are computed with the exponentials where all products are small: in all warps, some, and none. A quotient, and a cap that
/// decreases.
#[test]
fn capped_logits_of_whole_tiles() {
    let case = Case::new(128, (2, 1), &[(130, 700), (9, 300)])
        .with(|case| (case.body, case.mask) = (Body::Wgmma, FULL));
    for cap in [30.0, 8.0, 0.5] {
        let variant = recorded(&SoftCap::new(cap).expect("it is above 0"));
        check_with(&case, &variant, &|_| formula::soft_cap(f64::from(cap)));
    }
    for (json, cap, by) in [
        (r#"{"name": "quotient", "logits": {"tanh": {"div": ["logit", 40]}}}"#, 1.0, 40.0),
        (
            r#"{"name": "decreasing", "logits": {"mul": [-100, {"tanh": {"mul": ["logit", 0.0625]}}]}}"#,
            -100.0,
            16.0,
        ),
    ] {
        let variant = parsed(json);
        let logit = move |_: LogitIndex, s: f64| cap * (s / by).tanh();
        check_with(&case, &variant, &|_| Definition { logit: Box::new(logit), ..Definition::default() });
    }
}

#[test]
fn biased_logits() {
    let slopes = formula::alibi_slopes(4);
    check_all(&Alibi::new(4), &|_| formula::alibi(&slopes));
    let table = each_head(4 * 21, |at| (at * 0.7).sin());
    let wide_table = wide(&table);
    let bias = RelativePositionBias::new(table, 10).expect("the table fits");
    check_all(&bias, &|_| formula::relative_position_bias(&wide_table, 10));
}

/// A logits hook that reads every input, and a table at a rounded quotient: 41 times the f32 nearest to 1 / 41 is
/// below 1.
const ALL_INPUTS: &str = r#"{
    "name": "all_inputs", "tables": {"t": [0.5, -0.25, 1, 0, 2, 0.75]}, "scalars": {"by": 41},
    "logits": {"add": [
        {"mul": ["logit", {"add": [1, {"mul": ["request", 0.25]}]}]},
        {"add": [{"read": ["t", {"div": ["kv", "by"]}]},
                 {"mul": [{"add": ["qo_head", "kv_head"]}, {"mul": [{"sub": ["kv", "qo"]}, 0.01]}]}]}]}
}"#;

#[test]
fn logits_of_all_inputs() {
    let table = [0.5, -0.25, 1.0, 0.0, 2.0, 0.75];
    let definition = |request: usize| Definition {
        logit: Box::new(move |at: LogitIndex, s| {
            let bias = table[(at.j / 41).min(5)];
            s * (1.0 + request as f64 * 0.25)
                + bias
                + (at.h + at.g) as f64 * (at.j as f64 - at.p as f64) * 0.01
        }),
        ..Definition::default()
    };
    let variant = parsed(ALL_INPUTS);
    check_all(&variant, &definition);
}

#[test]
fn two_variants_at_once() {
    let slopes = formula::alibi_slopes(4);
    let both = Both::new(Alibi::new(4), SoftCap::new(2.0).expect("it is above 0"));
    let logit =
        |at: LogitIndex, s: f64| 2.0 * ((s + slopes[at.h] * (at.j as f64 - at.p as f64)) / 2.0).tanh();
    check_all(&both, &|_| Definition { logit: Box::new(logit), ..Definition::default() });
}

#[test]
fn masks() {
    let documents: Vec<Vec<u32>> =
        (0..4).map(|r| (0..200).map(|at: u32| (f64::from(at * 2 + r).sqrt() as u32) % 7).collect()).collect();
    let variant = DocumentMask::new(&documents).expect("the ids are small");
    check_all(&variant, &|r| formula::document_mask(&documents[r]));
    let prefixes = [60, 30, 0, 1];
    let places: Vec<Vec<u32>> = prefixes.iter().map(|_| (0..200).map(|at| at % 7).collect()).collect();
    let variant = MultiItemScoring::new(&prefixes, &places).expect("they are small");
    check_all(&variant, &|r| formula::multi_item_scoring(prefixes[r] as usize, &places[r]));
}

/// A mask of the last 20 keys of each request, of which the even ones are visible.
const LAST_KEYS: &str = r#"{
    "name": "last_keys", "mask_tail": 24, "tables": {"lens": LENS},
    "mask": {"or": [{"eq": [{"mul": [{"floor": {"div": ["kv", 2]}}, 2]}, "kv"]},
                    {"lt": ["kv", {"sub": [{"read": ["lens", "request"]}, 20]}]}]}
}"#;

/// Cases of several tiles, of few and many rows, with and without unmasked tiles.
fn long_cases() -> Vec<Case> {
    let mixed = Case::new(128, (2, 1), &[(130, 700), (9, 300), (1, 450), (3, 128)]);
    let wgmma = mixed.clone().with(|case| case.body = Body::Wgmma);
    vec![
        wgmma.clone(),
        wgmma.with(|case| case.mask = FULL),
        mixed.clone().with(|case| case.mask = FULL),
        mixed.with(|case| (case.piece, case.workers) = (128, 3)),
    ]
}

#[test]
fn masks_of_last_keys() {
    for case in cases().into_iter().chain(long_cases()) {
        let lens: Vec<usize> = case.lengths.iter().map(|(_, kv_len)| *kv_len).collect();
        let json = LAST_KEYS.replace("LENS", &format!("{lens:?}"));
        let variant = parsed(&json);
        assert_eq!(variant.mask_tail(), Some(24));
        let definition = |request: usize| {
            let free = lens[request].saturating_sub(20);
            let visible = move |at: LogitIndex| at.j < free || at.j.is_multiple_of(2);
            Definition { visible: Box::new(visible), ..Definition::default() }
        };
        check_with(&case, &variant, &definition);
    }
}

/// A hook that also hides key 3, against its own limit: it is not called there.
#[test]
fn masks_of_last_keys_are_not_computed_in_other_tiles() {
    let hides = r#"{"name": "wrong", "mask_tail": 16, "mask": {"not": {"eq": ["kv", 3]}}}"#;
    let variant = parsed(hides);
    let case = Case::new(128, (2, 1), &[(130, 700), (1, 450), (3, 300)]);
    for case in [case.clone().with(|case| case.body = Body::Wgmma), case] {
        check_with(&case, &variant, &|_| Definition::default());
    }
}

#[test]
fn masks_hide_values_that_are_not_finite() {
    let spoiled = [(0, 3, f64::NAN), (0, 44, f64::INFINITY), (1, 27, f64::NAN), (1, 80, f64::NEG_INFINITY)];
    // several tiles of `wgmma`
    for (body, more) in [(Body::Mma, 0), (Body::Wgmma, 200)] {
        let case = Case::new(64, (2, 1), &[(1, 70 + more), (40, 90 + more)]);
        let case = case.with(|case| (case.mask, case.body) = (FULL, body));
        let spoiled = spoiled.map(|(request, key, value)| (request, key + more, value));
        let documents = vec![(0..290).map(|at| at / 25 % 3).collect::<Vec<u32>>(); 2];
        let variant = DocumentMask::new(&documents).expect("the ids are small");
        let case = case.with(|case| case.spoiled = spoiled.to_vec());
        check_with(&case, &recorded(&variant), &|r| formula::document_mask(&documents[r]));
    }
}

#[test]
fn states_and_outputs() {
    let sinks = each_head(4, |h| 1.0 - h);
    let wide_sinks = wide(&sinks);
    let variant = AttentionSinks::new(sinks).expect("they are finite");
    check_all(&variant, &|_| formula::attention_sinks(&wide_sinks));
    let (qk, vo) = (each_head(4, |h| 0.5 + 0.5 * h), each_head(4, |h| 2.0 - 0.75 * h));
    let (wide_qk, wide_vo) = (wide(&qk), wide(&vo));
    check_all(&HeadScales::new(qk, vo), &|_| formula::head_scales(&wide_qk, &wide_vo));
}

/// States that a launch of its own merges. Hooks see the sum of all states.
#[test]
fn states_that_a_launch_merges() {
    let sinks = each_head(4, |h| 1.0 - h);
    let wide_sinks = wide(&sinks);
    let heads = r#"{"name": "heads", "output": {"add": ["o", "num_kv_heads"]}}"#;
    let heads = parsed(heads);
    let variant = recorded(&Both::new(AttentionSinks::new(sinks).expect("they are finite"), heads));
    let definition = |_| Definition {
        output: Box::new(|_, o| o.iter_mut().for_each(|o| *o += 1.0)),
        ..formula::attention_sinks(&wide_sinks)
    };
    let case = Case::new(64, (4, 1), &[(1, 350), (3, 340), (4, 378), (2, 350)]);
    let case =
        case.with(|case| (case.prefix, case.piece, case.has_merge_launch, case.workers) = (326, 64, true, 3));
    for case in [case.clone().with(|case| case.body = Body::Simt), case] {
        check(&case);
        check_with(&case, &variant, &definition);
    }
}

/// A hook whose output depends on row and element.
const OUTPUTS: &str = r#"{
    "name": "outputs",
    "mask": {"not": {"eq": [{"mul": [{"floor": {"div": ["kv", 3]}}, 3]}, "kv"]}},
    "output": {"add": [{"mul": ["o", {"add": [1, {"mul": ["dim", 0.125]}]}]},
                       {"mul": [{"add": ["request", "qo_head"]}, {"mul": ["qo", 0.01]}]}]}
}"#;

#[test]
fn outputs_of_all_inputs() {
    let definition = |request: usize| Definition {
        visible: Box::new(|at: LogitIndex| !at.j.is_multiple_of(3)),
        output: Box::new(move |at, o| {
            let shift = (request + at.h) as f64 * at.p as f64 * 0.01;
            o.iter_mut().enumerate().for_each(|(d, o)| *o = *o * (1.0 + d as f64 * 0.125) + shift);
        }),
        ..Definition::default()
    };
    let variant = parsed(OUTPUTS);
    check_all(&variant, &definition);
}

#[test]
fn what_is_refused() {
    let config = Case::new(32, (1, 1), &[]).config(Bodies::Both);
    let rope = Rope::new(32, 1e4).and_then(|rope| RotaryEmbedding::new(&rope)).expect("it is sound");
    assert_eq!(
        unsupported_variant(&config, &recorded(&rope)),
        ["there is a hook of query, expected none", "there is a hook of key, expected none"]
    );
    assert_eq!(
        unsupported_variant(&config, &recorded(&FlashSigmoid::new(-1.5))),
        ["logits are weights, expected a softmax"]
    );
    let prefixes = recorded(&PrefixLm::new(&[3]).expect("it is small"));
    assert!(unsupported_variant(&config, &prefixes).is_empty());
    assert_eq!(
        unsupported_variant(&Case::new(256, (1, 1), &[]).config(Bodies::Both), &prefixes),
        ["a mask hook leaves too few registers for head_dim vo = 256, the most is 192"]
    );
}
