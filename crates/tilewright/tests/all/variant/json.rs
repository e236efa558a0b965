//! Variants from JSON: accepted input, error texts, and robustness to hostile text.

use super::{execution_paths::execution_paths, problem};
use crate::generator::Generator;
use tilewright::{
    attention::variant::{ExpressionVariant, QueryRow},
    cpu::Trial,
};

fn read(text: &str) -> Result<ExpressionVariant, String> {
    ExpressionVariant::from_json(text).map_err(|why| why.to_string())
}

#[test]
fn the_documented_example_runs() {
    let text = r#"{
        "name": "soft_cap",
        "scalars": { "cap": 30 },
        "logits": { "mul": ["cap", { "tanh": { "div": ["logit", "cap"] } }] }
    }"#;
    let variant = read(text).unwrap();
    assert_eq!(read(&variant.to_json()).unwrap().to_json(), variant.to_json());
    for (path, run) in execution_paths(&variant, &problem(2, 2)) {
        let mut logits = [15.0];
        run.logits(QueryRow::default(), &[0], &mut logits);
        assert!((logits[0] - 30.0 * 0.5f32.tanh()).abs() < 1e-5, "{path}: {logits:?}");
    }
}

#[test]
fn names_bind_parts_and_buffers_take_stores() {
    let text = r#"{
        "name": "bound", "tables": {"t": [5, 6, 7]}, "buffers": {"seen": 4},
        "logits": {
            "let": [["a", {"add": ["logit", 1]}], ["b", {"mul": ["a", "a"]}]],
            "store": [["seen", "kv", "b"]],
            "in": {"add": ["b", {"read": ["t", "kv"]}]}
        }
    }"#;
    let trial = Trial::new(read(text).unwrap(), &problem(2, 2)).unwrap();
    let mut logits = [0.0, 1.0, 2.0, 3.0, 4.0];
    trial.logits(QueryRow::default(), &[0, 1, 2, 3, 4], &mut logits);
    assert_eq!(logits, [6.0, 10.0, 16.0, 23.0, 32.0]);
    assert_eq!(trial.recorded().buffers()[0].1.values(), [1.0, 4.0, 9.0, 16.0]);
}

#[test]
fn deep_and_shared_expressions_are_written_in_parts() {
    let deep = (0..150).fold("\"logit\"".to_owned(), |inner, i| {
        let part = format!(r#"{{"add": [{inner}, {i}.5]}}"#);
        if i == 40 { "\"logit\"".to_owned() } else { part }
    });
    assert!(read(&format!(r#"{{"name": "deep", "logits": {deep}}}"#)).is_err(), "deeper than 64");
    // 40 levels of sharing: as a tree it would have 2^40 leaves
    let parts = (0..40).map(|i| {
        let before = if i == 0 { "logit".to_owned() } else { format!("p{}", i - 1) };
        format!(r#"["p{i}", {{"add": ["{before}", "{before}"]}}]"#)
    });
    let parts = parts.collect::<Vec<_>>().join(", ");
    let text = format!(r#"{{"name": "shared", "logits": {{"let": [{parts}], "in": "p39"}}}}"#);
    let variant = read(&text).unwrap();
    let json = variant.to_json();
    assert!(json.len() < 10_000, "{} bytes", json.len());
    assert_eq!(read(&json).unwrap().to_json(), json);
    // a chain of the maximum length of a hook
    let chain = (0..250).map(|i| {
        let before = if i == 0 { "logit".to_owned() } else { format!("p{}", i - 1) };
        format!(r#"["p{i}", {{"add": [{{"neg": "{before}"}}, {i}]}}]"#)
    });
    let chain = chain.collect::<Vec<_>>().join(", ");
    let text =
        format!(r#"{{"name": "long", "scalars": {{}}, "logits": {{"let": [{chain}], "in": "p249"}}}}"#);
    let json = read(&text).map(|variant| variant.to_json());
    let why = json.unwrap_err();
    assert_eq!(why, "attention.variant: a hook computes more than 512 different values");
}

#[test]
fn constants_beyond_json_have_names() {
    let variant =
        read(r#"{"name": "c", "logits": {"min": ["logit", "inf"]}, "output": {"max": ["-inf", "o"]}}"#);
    let json = variant.unwrap().to_json();
    assert!(json.contains(r#""inf""#) && json.contains(r#""-inf""#), "{json}");
    assert_eq!(read(&json).unwrap().to_json(), json);
    for x in ["0.1", "-0.0", "1e-45", "3.4028235e38", "16777217.5", "123456789"] {
        let text =
            format!(r#"{{"name": "c", "scalars": {{"a": {x}}}, "logits": {{"mul": ["logit", "a"]}}}}"#);
        let variant = read(&text).unwrap();
        let again = read(&variant.to_json()).unwrap();
        let bits = |variant: &ExpressionVariant| variant.scalars()[0].1.to_bits();
        assert_eq!(bits(&again), bits(&variant), "{x}");
        assert_eq!(bits(&variant), x.parse::<f32>().unwrap().to_bits(), "{x}");
    }
}

/// The text after the name, and the error text.
const REFUSED: [(&str, &str); 23] = [
    (
        r#""logit": 1"#,
        "unknown member \"logit\", expected one of name, softmax, mask_tail, scalars, tables, buffers, query, key, value, logits, mask, update, output",
    ),
    (
        r#""key": ["first", "qo"]"#,
        "key[1]: unknown name \"qo\", expected one of first, second, kv, kv_head, dim, num_qo_heads, num_kv_heads",
    ),
    (r#""key": "first""#, "key: \"first\", expected an array of two expressions"),
    (r#""logits": null"#, "logits: nothing, expected a number, a name or {\"operation\": operands}"),
    (r#""logits": {"add": ["logit"]}"#, "logits.add: an array of 1, expected an array of 2 operands"),
    (r#""logits": {"add": ["logit", true]}"#, "logits.add[1]: a condition, expected a number"),
    (r#""mask": "kv""#, "mask: a number, expected a condition"),
    (
        r#""logits": {"neg": ["logit"]}"#,
        "logits.neg: an array of 1, expected a number, a name or {\"operation\": operands}",
    ),
    (
        r#""logits": {"read": ["t", 0]}"#,
        "logits.read: unknown table \"t\", expected one of none, there is none",
    ),
    (
        r#""tables": {"t": []}, "logits": {"read": ["t", 0]}"#,
        "table \"t\" has 0 elements, expected 1 to 16777216",
    ),
    (r#""tables": {"t": [1, "x"]}"#, "tables.t[1]: \"x\", expected a number"),
    (
        r#""tables": {"t": "x"}"#,
        "tables.t: \"x\", expected an array of numbers, or the number of elements that each run binds",
    ),
    (r#""tables": {"t": 0}"#, "tables.t: 0, expected a number of elements, 1 to 16777216"),
    (r#""scalars": {"kv": 1}"#, "scalars: \"kv\" has a meaning in every hook, expected another name"),
    (r#""scalars": {"a": 1e300}"#, "scalars.a: 1e+300, expected a number that f32 can hold"),
    (r#""buffers": {"b": 0}"#, "buffers.b: 0, expected a number of elements, 1 to 16777216"),
    (r#""mask_tail": 0"#, "mask_tail: 0, expected a number of keys from 1"),
    (r#""softmax": 1"#, "softmax: 1, expected true or false"),
    (r#""logits": {"let": 1, "in": "logit"}"#, "logits.let: 1, expected an array"),
    (
        r#""logits": {"let": [["kv", 1]], "in": "logit"}"#,
        "logits.let[0]: \"kv\" has a meaning already or is no name, expected another",
    ),
    (
        r#""logits": {"let": [["a"]], "in": "logit"}"#,
        "logits.let[0]: an array of 1, expected [\"name\", expression]",
    ),
    (
        r#""logits": {"store": [["b", 0, 0]], "in": "logit"}"#,
        "logits.store[0]: unknown buffer \"b\", expected one of none, there is none",
    ),
    (
        r#""logits": {"lets": [], "in": "logit"}"#,
        "logits: unknown member \"lets\", expected one of let, store, in",
    ),
];

#[test]
fn tables_without_values_keep_their_length() {
    let text = r#"{"name": "v", "tables": {"a": [1, 2], "b": 3, "unused": 4},
                   "logits": {"add": [{"read": ["a", "kv"]}, {"read": ["b", "kv"]}]}}"#;
    let parsed = ExpressionVariant::from_json(text).expect("it is sound");
    let again = ExpressionVariant::from_json(&parsed.to_json()).expect("it is sound");
    for variant in [&parsed, &again, &ExpressionVariant::of(&parsed).expect("it can be recorded")] {
        let tables: Vec<_> =
            variant.tables().iter().map(|(name, table)| (name.as_str(), table.len())).collect();
        assert_eq!(tables, [("a", 2), ("b", 3)]);
        assert_eq!([0, 1, 2].map(|at| variant.is_bound(at)), [false, true, false]);
    }
}

#[test]
fn errors_name_location_and_expectation() {
    let of = |body: &str| read(&format!(r#"{{"name": "v", {body}}}"#)).unwrap_err();
    let operations = "neg, abs, floor, sqrt, exp2, log2, exp, tanh, sigmoid, sin_turns, cos_turns, add, sub, mul, div, \
                      min, max, mul_add, turns, lt, le, eq, and, or, not, select, read";
    assert_eq!(
        of(r#""scalars": {"cap": 3}, "logits": {"mul": ["cap", {"tahn": "logit"}]}"#),
        format!("attention.variant: logits.mul[1]: unknown operation \"tahn\", expected one of {operations}")
    );
    for (body, want) in REFUSED {
        assert_eq!(of(body), format!("attention.variant: {want}"), "{body}");
    }
    assert_eq!(read("[]").unwrap_err(), "attention.variant: the document: an array of 0, expected an object");
    assert_eq!(read("{}").unwrap_err(), "attention.variant: name: nothing, expected a string");
    assert_eq!(
        read(r#"{"name": "two words"}"#).unwrap_err(),
        "attention.variant: \"two words\" is no name: expected a letter, then letters, digits and _, at most 256 in all"
    );
    let deep = (0..70).fold("1".to_owned(), |inner, _| format!(r#"{{"neg": {inner}}}"#));
    assert_eq!(
        of(&format!(r#""logits": {deep}"#)),
        "attention.variant: logits: nested deeper than 64, expected let and names"
    );
    assert!(read("{").unwrap_err().starts_with("attention.variant: EOF while parsing"));
}

#[test]
fn hostile_text_is_refused_or_runs_and_never_panics() {
    let seeds = [
        r#"{"name":"a","scalars":{"c":3},"tables":{"t":[1,2]},"logits":{"mul":["c",{"tanh":{"read":["t","logit"]}}]}}"#,
        r#"{"name":"b","buffers":{"w":9},"logits":{"let":[["p",{"add":["kv",1]}]],"store":[["w","p","logit"]],"in":"p"}}"#,
        r#"{"name":"t","mask_tail":32,"mask":{"lt":["kv","qo"]}}"#,
        r#"{"name":"c","softmax":false,"key":[{"neg":"first"},"second"],"mask":{"or":[true,{"lt":["kv","qo"]}]}}"#,
    ];
    let pieces = [
        "{", "}", "[", "]", "\"", ",", ":", "1e999", "-0", "null", "true", "\"kv\"", "\"in\"", "\"let\"",
        "\u{0}",
    ];
    let mut random = Generator::new(11);
    let (mut ran, mut refused) = (0, 0);
    for round in 0..6000 {
        let mut text = seeds[round % seeds.len()].to_owned();
        for _ in 0..random.below(4) {
            let at = random.below(text.len());
            let to = (at + random.below(6)).min(text.len());
            if text.is_char_boundary(at) && text.is_char_boundary(to) {
                text.replace_range(at..to, random.pick(&pieces));
            }
        }
        match ExpressionVariant::from_json(&text) {
            Err(why) => {
                refused += 1;
                assert_eq!(why.operator(), "attention.variant");
            }
            Ok(variant) => {
                let Ok(trial) = Trial::new(variant, &problem(2, 2)) else { continue };
                ran += 1;
                trial.logits(QueryRow::default(), &[0, 1, 70], &mut [f32::NAN, 1.0, f32::INFINITY]);
                trial.mask(QueryRow::default(), &[0, 1, 70]);
                assert!(read(&trial.recorded().to_json()).is_ok(), "{text}");
            }
        }
    }
    assert!(ran > 500 && refused > 500, "{ran} ran, {refused} were refused");
    let nested = "[".repeat(100_000);
    assert!(read(&format!(r#"{{"name": "x", "logits": {nested}"#)).is_err());
}
