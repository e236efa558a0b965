//! Bench definitions: the checked-in file is valid, and errors are reported before any measurement.

#[path = "../../benches/cpu_attention/case.rs"]
mod case;

use case::{Case, Form, parse};

const SHIPPED: &str = include_str!("../../benches/definitions/cpu-attention.toml");
const FIRST: &str = r#"
[[case]]
name = "first"
why = "To be compared with."
heads = [4, 2]
head_dim = 8
dtype = "bf16"
requests = 3
qo_len = 1
kv_len = 100
page_size = 16
bound = "memory"
"#;

/// The case `name`: a copy of [`FIRST`] with lines replaced or added.
fn second(name: &str, lines: &[&str]) -> String {
    let field = |line: &str| line.split(" = ").next().unwrap().to_owned();
    let replaced: Vec<String> = lines.iter().map(|line| field(line)).collect();
    let kept = FIRST.lines().filter(|line| !replaced.contains(&field(line)));
    let text: String = kept.map(|line| line.to_owned() + "\n").collect();
    let lines: String = lines.iter().map(|line| (*line).to_owned() + "\n").collect();
    text.replace("\"first\"", &format!("\"{name}\"")) + &lines
}

fn parsed(lines: &[&str]) -> Case {
    parse(&second("it", lines)).unwrap().remove(0)
}

#[test]
fn the_checked_in_definitions_are_valid() {
    let cases = parse(SHIPPED).unwrap();
    assert!(cases.iter().any(|case| case.peer && case.baseline.is_none()));
}

#[test]
fn flops_and_bytes_equal_hand_counts() {
    let rows = ["qo_len = 3", "kv_len = 5"];
    // rows at positions 2, 3 and 4 have 3, 4 and 5 visible keys; 4 heads of 8; 3 requests
    assert_eq!(parsed(&rows).flops(), 3 * (3 + 4 + 5) * 4 * 8 * 4);
    let window = [&rows[..], &["variant = \"window\"", "window = 3"]].concat();
    assert_eq!(parsed(&window).flops(), 3 * (3 + 4 + 4) * 4 * 8 * 4);
    // keys and values of 2 heads of 8 in bf16
    assert_eq!(parsed(&[]).compulsory_bytes(), 300 * 2 * 8 * 2 * 2);
    assert_eq!(parsed(&["shared_len = 96"]).compulsory_bytes(), (96 + 3 * 4) * 2 * 8 * 2 * 2);
    assert_eq!(parsed(&["dtype = \"int8\""]).compulsory_bytes(), 300 * 2 * 8 * 2);
}

#[test]
fn the_peer_runs_decode_in_both_forms() {
    assert_eq!(parsed(&["peer = true"]).forms(), [Form::Gqa, Form::Rows]);
    assert_eq!(parsed(&["peer = true", "heads = [2, 2]"]).forms(), [Form::Gqa]);
    assert_eq!(parsed(&["peer = true", "qo_len = 100"]).forms(), [Form::Gqa]);
    assert_eq!(parsed(&[]).forms(), []);
}

#[test]
fn invalid_definitions_are_rejected() {
    for (lines, expected) in [
        (&["speed = 2.0"][..], "unknown field `speed`"),
        (&["dtype = \"fp8\""], "unknown variant `fp8`, expected one of `f32`, `f16`, `bf16`"),
        (&["bound = \"disk\""], "unknown variant `disk`, expected `memory` or `compute`"),
        (&["variant = \"sinks\""], "unknown variant `sinks`, expected one of `window`, `soft_cap`, `alibi`"),
        (&["baseline = \"third\""], "case it: baseline = third is the name of no case"),
        (&["baseline = \"it\""], "case it: the baseline is the case itself"),
        (&["speedup = 2.0"], "case it: speedup or time_ratio without a baseline"),
        (&["time_ratio = 1.1"], "case it: speedup or time_ratio without a baseline"),
        (
            &["window = 7"],
            "case it: variant = \"window\" and window = <keys> are given together or not at all",
        ),
        (&["variant = \"window\""], "case it: variant = \"window\" and window = <keys> are given together"),
        (&["why = \" \""], "case it: why is empty, expected the reason to measure it"),
        (&["heads = [4, 3]"], "case it: the query heads are not a multiple of the KV heads"),
        (&["heads = [4, 0]"], "case it: a size is 0, expected at least 1"),
        (&["qo_len = 101"], "case it: qo_len is more than kv_len"),
        (&["shared_len = 112"], "case it: shared_len is more than kv_len"),
        (&["shared_len = 40"], "case it: shared_len is no multiple of page_size"),
        (&["peer_speedup = 2.0"], "case it: peer_speedup or peer_rows_speedup without peer = true"),
        (&["peer = true", "dtype = \"e4m3\""], "case it: the peer has no 8-bit cache"),
        (&["peer = true", "variant = \"alibi\""], "case it: the peer is timed without variants only"),
        (&["peer = true", "shared_len = 16"], "case it: the peer has no shared keys"),
        (&["peer = true", "qo_len = 2"], "case it: the peer's causal mask is aligned at the top left"),
        (
            &["peer = true", "heads = [2, 2]", "peer_rows_speedup = 2.0"],
            "case it: peer_rows_speedup is for one query row of grouped heads",
        ),
    ] {
        let why = parse(&(FIRST.to_owned() + &second("it", lines))).unwrap_err();
        assert!(why.contains(expected), "{lines:?}: {why}");
    }
    let why = parse(&(FIRST.to_owned() + FIRST)).unwrap_err();
    assert_eq!(why, "case first: there is another case of this name");
    let why = parse(&second("a,b", &[])).unwrap_err();
    assert_eq!(why, "case a,b: the name must fit a cell of a CSV without quotes");
}
