//! `tilewright bench`, run as a process: rates, anatomy, files, errors.

use crate::output::{text, tilewright};
use std::process::Output;

fn bench(arguments: &[&str]) -> Output {
    tilewright(&[&["bench"], arguments].concat()).output().unwrap()
}

#[test]
fn rates_and_anatomy_are_printed_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let (csv, svg) = (folder.path().join("rates.csv"), folder.path().join("step.svg"));
    let quick = ["--steps", "3", "--repeats", "1", "--batch", "1,2", "--context", "5", "--prefill", "20"];
    let (csv_name, svg_name) = (csv.display().to_string(), svg.display().to_string());
    let files = ["--csv", &csv_name, "--svg", &svg_name, "--weights", "int8"];
    let output = bench(&[&["--model", "tests/fixtures/qwen3/config.json"][..], &quick, &files].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report = text(&output.stdout);
    for case in [
        "decode 1 x 5 ", "decode 2 x 5 ", "prefill 20 ", "gemm.gated_linear", "attention.run",
        "between operators",
    ] {
        assert!(report.contains(case), "no {case} in {report}");
    }
    let csv = std::fs::read_to_string(csv).unwrap();
    let rows: Vec<_> = csv.lines().take_while(|line| !line.is_empty()).collect();
    assert_eq!(rows.len(), 4, "{csv}");
    for row in &rows[1..] {
        let numbers: Vec<f64> = row.split(',').skip(1).map(|number| number.parse().unwrap()).collect();
        assert!(numbers.iter().all(|number| *number > 0.0), "{row}");
        assert!(numbers[1] <= numbers[0] && numbers[0] <= numbers[2], "{row}");
    }
    let svg = std::fs::read_to_string(svg).unwrap();
    roxmltree::Document::parse(&svg).unwrap();
    assert!(svg.contains("decode 1 x 5: "));
}

#[test]
fn wrong_arguments_are_named() {
    for (arguments, message) in [
        (&["--model", "no-such-file"][..], "cannot read `no-such-file`"),
        (&["--model", "Cargo.toml"], "Cargo.toml"),
        (&["--batch", "0"], "0 is not in 1..=4096"),
        (&["--threads", "0"], "0 is not in 1..=1024"),
        (&["--threads", "1025"], "1025 is not in 1..=1024"),
        (&["--weights", "int2"], "int2"),
        (&["--text", "no-such-file"], "cannot read `no-such-file`"),
    ] {
        let output = bench(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(text(&output.stderr).contains(message), "{}", text(&output.stderr));
    }
}
