//! Tables and buffers: index rounding, clamping and dropping, and the limit of kernel parameters.

use super::probe::{LOGIT, Place, on_the_host, run, ways};
use tilewright::attention::variant::{ExpressionVariant, QueryRow};
use tilewright_kernels::variant::Hooks;

const INDICES: [f32; 16] = [
    0.0,
    0.99,
    1.0,
    7.0, // no key
    2.7,
    3.0,
    4.0,
    -0.5,
    -1.0,
    5.0,
    1e30,
    -1e30,
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    2_147_483_648.0,
];

fn places() -> Vec<Place> {
    let place = |x: &f32| Place { row: QueryRow::default(), kv: 0, dim: 0, x: [*x, 0.0], real: *x != 7.0 };
    INDICES.iter().map(place).collect()
}

fn variant(text: &str) -> ExpressionVariant {
    ExpressionVariant::from_json(text).unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn reading_rounds_down_and_clamps() {
    let variant = variant(
        r#"{"name": "reads", "tables": {"t": [10, 11, 12, 13, 14]}, "logits": {"read": ["t", "logit"]}}"#,
    );
    let want =
        [10.0, 10.0, 11.0, 7.0, 12.0, 13.0, 14.0, 10.0, 10.0, 14.0, 14.0, 10.0, 10.0, 14.0, 10.0, 14.0];
    for way in ways() {
        let (got, _) = run(&variant, way, &places());
        for ((index, got), want) in INDICES.iter().zip(got).zip(want) {
            assert!(got.numbers[LOGIT] == want, "t[{index}], {way:?}: {got:?}");
        }
    }
}

#[test]
fn storing_rounds_down_and_drops() {
    let text = r#"{"name": "stores", "buffers": {"kept": 5, "other": 2},
        "logits": {"store": [["kept", "logit", {"floor": "logit"}], ["other", 1, 8]], "in": "logit"}}"#;
    for way in ways() {
        let variant = variant(text);
        let (_, buffers) = run(&variant, way, &places());
        on_the_host(&variant, &places());
        for (got, (name, want)) in buffers.iter().zip(variant.buffers()) {
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(got), bits(&want.values()), "{name}, {way:?}");
        }
        assert_eq!(buffers[0], [0.0, 1.0, 2.0, 3.0, 4.0]);
        assert!(buffers[1][0].is_nan() && buffers[1][1] == 8.0);
    }
}

/// Nested sum of the parameters `s<first>` to `s<end - 1>`.
fn sum(first: usize, end: usize) -> String {
    if end == first + 1 {
        return format!("\"s{first}\"");
    }
    let middle = first.midpoint(end);
    format!(r#"{{"add": [{}, {}]}}"#, sum(first, middle), sum(middle, end))
}

#[test]
fn rejects_too_many_parameters() {
    let scalars: Vec<String> = (0..769).map(|i| format!("\"s{i}\": {i}")).collect();
    let document = |last: usize| {
        format!(
            r#"{{"name": "many", "scalars": {{{}}}, "value": {}, "logits": {}, "output": {}, "mask": {{"lt": [{}, 0]}}}}"#,
            scalars.join(","),
            sum(0, 200),
            sum(200, 400),
            sum(400, 600),
            sum(600, last),
        )
    };
    // unused tables are no parameters
    Hooks::of("attend", &variant(&document(768))).expect("3072 bytes");
    let variant = variant(&document(769));
    let error = Hooks::of("attend", &variant).expect_err("too many").to_string();
    assert_eq!(
        error,
        "kernel attend: 769 parameters and 0 tables and buffers of the variant take 3076 bytes, the most is 3072"
    );
}
