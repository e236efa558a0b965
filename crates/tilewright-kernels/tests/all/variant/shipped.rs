//! Every shipped variant, and one that reads every input in every hook.

use super::probe::{HEADS, Place, Results, Way, on_the_host, run, ways};
use tilewright::{
    attention::variant::{
        Alibi, AttentionSinks, Both, DocumentMask, DumpLogits, ExpressionVariant, FlashSigmoid, HeadScales,
        MultiItemScoring, Plain, PrefixLm, QueryRow, RelativePositionBias, RotaryEmbedding, SoftCap, Variant,
    },
    rope::Rope,
};
use tilewright_kernels::variant::Arithmetic;

fn shipped() -> Vec<ExpressionVariant> {
    let dim = 6;
    let numbers = |count: usize| (0..count).map(|i| (i as f32 - 3.0) / 8.0).collect::<Vec<f32>>();
    let of = [
        ExpressionVariant::of(&Plain),
        ExpressionVariant::of(&SoftCap::new(30.5).unwrap()),
        ExpressionVariant::of(&Alibi::new(HEADS.qo)),
        ExpressionVariant::of(&AttentionSinks::new(vec![0.25, -1e-20, 5.0, -2.0]).unwrap()),
        ExpressionVariant::of(&FlashSigmoid::new(-0.1)),
        ExpressionVariant::of(&RotaryEmbedding::new(&Rope::new(dim, 1e4).unwrap()).unwrap()),
        ExpressionVariant::of(&RelativePositionBias::new(numbers(HEADS.qo * 7), 3).unwrap()),
        ExpressionVariant::of(&HeadScales::new(numbers(4), vec![1.0, 0.5, -2.0, 3.0])),
        ExpressionVariant::of(&PrefixLm::new(&[3, 9]).unwrap()),
        ExpressionVariant::of(&DocumentMask::new(&[vec![0, 0, 1], vec![5, 5, 5, 7]]).unwrap()),
        ExpressionVariant::of(&MultiItemScoring::new(&[2, 1], &[vec![0, 1, 2], vec![1; 40]]).unwrap()),
        ExpressionVariant::of(&Both::new(Alibi::new(4), SoftCap::new(30.0).unwrap())),
    ];
    of.into_iter().map(|recorded| recorded.expect("it can be recorded")).chain([every_input()]).collect()
}

/// Each hook combines all of its inputs, so that swapped inputs are detected.
fn every_input() -> ExpressionVariant {
    let mix = |base: &str, inputs: &[&str]| {
        inputs.iter().enumerate().fold(format!("\"{base}\""), |sum, (i, input)| {
            format!(r#"{{"mul_add": ["{input}", {}, {sum}]}}"#, (i + 2) as f32 / 8.0)
        })
    };
    let heads = ["num_qo_heads", "num_kv_heads", "rate"];
    let of = |base: &str, inputs: &[&str]| mix(base, &[inputs, &heads].concat());
    let query = ["request", "qo", "qo_head", "kv_head", "dim"];
    let (key, both) = (["kv", "kv_head", "dim"], ["request", "qo", "kv", "qo_head", "kv_head"]);
    let text = format!(
        r#"{{"name": "every_input", "scalars": {{"rate": 0.375}},
            "query": [{}, {}], "key": [{}, {}], "value": {}, "logits": {},
            "mask": {{"lt": [{}, "num_qo_heads"]}}, "update": [{}, {}], "output": {}}}"#,
        of("first", &query),
        of("second", &query),
        of("first", &key),
        of("second", &key),
        of("x", &key),
        of("logit", &both),
        mix("request", &["qo", "kv", "qo_head", "kv_head"]),
        of("max", &query[..4]),
        of("sum", &query[..4]),
        of("o", &query),
    );
    ExpressionVariant::from_json(&text).unwrap_or_else(|why| panic!("{why}\n{text}"))
}

/// Rows before the first key and far out, near and far keys, all heads and dims.
fn places() -> Vec<Place> {
    const QO: [i32; 7] = [-3, 0, 1, 2, 5, 31, 131_071];
    const KV: [u32; 7] = [0, 1, 2, 3, 7, 32, 131_072];
    let place = |i: usize| {
        let (qo, kv, qo_head) = (QO[i % 7], KV[i / 7 % 7], (i % 4) as u32);
        let row = QueryRow { request: (i / 3 % 4) as u32, qo, qo_head, kv_head: qo_head / 2 };
        let x = [((i * 37 % 101) as f32 - 50.0) / 4.0, ((i * 53 % 89) as f32 + 1.0) / 8.0];
        Place { row, kv, dim: i % 3, x, real: i % 11 != 3 }
    };
    (0..7 * 7 * 6).map(place).collect()
}

/// Compares within the rounding error of inputs and outputs; NaN equals NaN.
fn assert_near(way: Way, variant: &ExpressionVariant, (place, got, want): (&Place, &Results, &Results)) {
    let roundings = match way.arithmetic {
        Arithmetic::Fast => 40.0,
        Arithmetic::Exact => 8.0,
    };
    assert_eq!(got.seen, want.seen, "{}, {way:?}, {place:?}: mask", variant.name());
    for (i, (got, want)) in got.numbers.iter().zip(want.numbers).enumerate() {
        let magnitude = want.abs().max(place.x[0].abs()).max(place.x[1].abs()).max(1.0);
        let bound = roundings * magnitude / (1_u64 << 24) as f32;
        let near = (got - want).abs() <= bound || *got == want || got.is_nan() && want.is_nan();
        assert!(near, "{}, {way:?}, {place:?}: result {i}: {got} instead of {want}", variant.name());
    }
}

#[test]
fn every_variant_matches_the_host() {
    let places = places();
    for variant in shipped() {
        let want = on_the_host(&variant, &places);
        for way in ways() {
            let (got, _) = run(&variant, way, &places);
            for ((place, got), want) in places.iter().zip(&got).zip(&want) {
                assert_near(way, &variant, (place, got, want));
            }
        }
    }
}

#[test]
fn every_variant_agrees_on_infinities_and_nan() {
    const EXTREMES: [f32; 9] =
        [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 3e38, -3e38, 1e-40, -1e-40, 0.0, -0.0];
    let of_row = |qo| QueryRow { request: 1, qo, qo_head: 1, kv_head: 0 };
    let place = |i: usize| Place {
        row: of_row(i as i32 % 5),
        kv: 2,
        dim: 1,
        x: [EXTREMES[i % 9], EXTREMES[i / 9]],
        real: true,
    };
    let places: Vec<Place> = (0..81).map(place).collect();
    let sort = |x: f32| if x.is_finite() { "finite".to_owned() } else { x.to_string() };
    for variant in shipped() {
        let want = on_the_host(&variant, &places);
        for way in ways() {
            for ((place, got), want) in places.iter().zip(run(&variant, way, &places).0).zip(&want) {
                let sorts = |results: &Results| results.numbers.map(sort);
                assert_eq!(sorts(&got), sorts(want), "{}, {way:?}, {place:?}", variant.name());
            }
        }
    }
}

#[test]
fn dumped_logits_are_stored_at_their_index() {
    for way in ways() {
        let variant = ExpressionVariant::of(&DumpLogits::new(1, 4, (3, 9)).unwrap()).unwrap();
        // every row of the request, keys beyond its end, and other requests
        let place = |i: usize| {
            let row = QueryRow {
                request: (i / 200) as u32,
                qo: (i % 5) as i32 + 5,
                qo_head: (i / 5 % 4) as u32,
                kv_head: 0,
            };
            Place { row, kv: (i / 20 % 10) as u32, dim: 0, x: [i as f32, 1.0], real: i % 17 != 3 }
        };
        let places: Vec<Place> = (0..600).map(place).collect();
        let (_, buffers) = run(&variant, way, &places);
        on_the_host(&variant, &places);
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        let want = variant.buffers()[0].1.values();
        let kept = want.iter().filter(|x| !x.is_nan()).count();
        assert!((90..want.len()).contains(&kept), "{kept} logits are asked for, all but those of no key");
        assert_eq!(bits(&buffers[0]), bits(&want), "{way:?}");
    }
}
