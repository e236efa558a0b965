//! `tilewright plan`, run as a process: report, SVG and error messages.

use crate::output::{error_text, output_with_input, piped, printed, root, text, tilewright};
use std::{path::Path, process::Output};

/// Two decode requests and a prefill chunk, on a fixed machine.
const BATCH: [&str; 6] = ["--heads", "32/8", "--head-dim", "128", "--requests", "2*1:4096,64:700"];
const MACHINE: [&str; 4] = ["--threads", "2", "--roofline", "20/100"];

fn plan(arguments: &[&[&str]], input: &str) -> Output {
    let mut command = tilewright(&[&["plan"], arguments.concat().as_slice()].concat());
    command.env("TERM", "xterm");
    output_with_input(piped(command), input.as_bytes())
}

/// The columns of each worker with work.
fn busy_workers(report: &str) -> Vec<Vec<&str>> {
    let table = report.lines().skip_while(|line| !line.starts_with("worker ")).skip(1);
    let rows =
        table.take_while(|line| !line.is_empty()).map(|line| line.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row[1] != "idle").collect()
}

/// The number before `unit`, a singular noun, in the report.
#[track_caller]
fn count(report: &str, unit: &str) -> usize {
    let before = report.split(unit).next().unwrap();
    before.split_whitespace().next_back().unwrap().parse().unwrap()
}

#[test]
fn the_report_has_explanation_estimate_and_load_of_each_worker() {
    let output = plan(&[&["--heads=32/8", "--head-dim=128", "--requests=2*1:4096"], &MACHINE], "");
    let report = printed(&output);
    let lines: Vec<&str> = report.lines().collect();
    assert_eq!(lines[0], "32/8 heads, head_dim 128, bf16 q/o, bf16 KV, NHD, causal");
    assert_eq!(lines[1], "  2 requests, 2 query rows, keys split: balanced");
    assert!(lines[6].ends_with("given 20.0 GB/s and 100.0 GFLOP/s:"), "{report}");
    // 2 requests of 4096 keys, 8 heads, 2 * 128 elements of 2 bytes: 33.55 MB, and 0.03 MB of queries and outputs;
    // 4 times the heads, 2 operations an element: 0.134 GFLOP
    assert_eq!(lines[7], "  at least 1.68 ms, bound by memory (memory 1.68 ms, compute 1.34 ms)");
    assert_eq!(lines[9], "worker  items  partial   cost                            requests");

    let workers = count(report, " worker");
    let shares = busy_workers(report);
    let column = |at: usize| shares.iter().map(move |share| share[at].parse::<usize>().unwrap());
    assert!(column(0).is_sorted() && column(0).all(|worker| worker < workers), "{report}");
    let items = count(report, " work item");
    assert_eq!(column(1).sum::<usize>(), items);
    assert!(column(2).sum::<usize>() >= 2 * count(report, " merge"), "{report}");
    assert!(column(2).sum::<usize>() > 0, "{report}");
    assert_eq!((shares[0][5], shares[shares.len() - 1][5]), ("0", "1"));
}

#[test]
fn idle_workers_are_folded_and_workers_explained_by_threads() {
    let small = ["--heads=4/1", "--head-dim=128", "--requests=1:100", "--roofline=20/100"];
    for (threads, executed) in [
        ("1", "1 thread executes them one after another"),
        ("4", "4 threads execute them, each takes the next one when it is done"),
    ] {
        let output = plan(&[&small, &["--threads", threads]], "");
        let report = printed(&output);
        let workers = count(report, " worker");
        let table: Vec<&str> = report.lines().skip(10).take_while(|line| !line.is_empty()).collect();
        assert!(table.len() <= 5 && workers >= 16, "{report}");
        assert!(table.last().unwrap().ends_with(&format!("-{}  idle", workers - 1)), "{report}");
        let per_thread = workers / threads.parse::<usize>().unwrap();
        let explained =
            format!("workers: {per_thread} per thread, so that a delayed thread delays little; {executed}\n");
        assert!(report.ends_with(&explained), "{report}");
    }
}

#[test]
fn one_of_a_kind_is_singular() {
    let output = plan(&[&["--heads=4/1", "--head-dim=128", "--requests=1:10"], &MACHINE], "");
    let report = printed(&output);
    assert!(
        report.contains("\n  1 request, 1 query row, keys split: balanced\n  1 work item on "),
        "{report}"
    );
    assert!(report.contains(" balanced), 0 merges\n"), "{report}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("one.svg");
    let drawn = ["--heads=4/1", "--head-dim=128", "--requests=1:10", "--svg", path.to_str().unwrap()];
    printed(&plan(&[&drawn, &MACHINE], ""));
    let svg = std::fs::read_to_string(path).unwrap();
    assert!(svg.contains(">1 work item of 1 request on "), "{svg}");
}

#[test]
fn more_threads_than_cores_are_a_warning_if_this_machine_is_measured() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let batch = ["--heads=4/1", "--head-dim=128", "--requests=1:10"];
    let threads = format!("--threads={}", cores + 1);
    let measured = plan(&[&batch, &[&threads]], "");
    let warning = format!("warning: --threads {} is above the {cores} core", cores + 1);
    assert!(text(&measured.stderr).starts_with(&warning), "{}", text(&measured.stderr));
    printed(&plan(&[&batch, &[&threads, "--roofline=20/100"]], ""));
}

#[test]
fn a_large_batch_is_planned_in_seconds() {
    let start = std::time::Instant::now();
    let output = plan(&[&["--heads=4/1", "--head-dim=128", "--requests=65536*1:4000"], &MACHINE], "");
    assert!(printed(&output).contains("  65536 requests, 65536 query rows, "));
    assert!(start.elapsed().as_secs_f64() < 3.0, "{:?}", start.elapsed());
}

#[test]
fn costs_follow_the_printed_formula() {
    let output = plan(&[&["--heads=4/1", "--head-dim=128", "--requests=2*1:4096"], &MACHINE], "");
    let report = printed(&output);
    let cost: usize = busy_workers(report).iter().map(|worker| worker[3].parse::<usize>().unwrap()).sum();
    let (tile, overhead) = (count(report, " keys +"), count(report, ") × (query rows"));
    let tiles = 2 * 4096 / tile + overhead * count(report, " work item");
    assert_eq!(cost, tiles * (1 + count(report, ") × KV heads")));
}

#[test]
fn equal_inputs_give_equal_outputs() {
    let folder = tempfile::tempdir().unwrap();
    let draw = |name: &str| {
        let path = folder.path().join(name);
        let output = plan(&[&BATCH, &MACHINE, &["--svg", path.to_str().unwrap()]], "");
        (printed(&output).to_owned(), std::fs::read_to_string(path).unwrap())
    };
    assert_eq!(draw("one.svg"), draw("two.svg"));
}

#[test]
fn json_and_arguments_are_equivalent() {
    let all = r#"{"heads": [32, 8], "head_dim": [192, 128], "dtype": "f16", "page_size": 8, "mask": "full",
                  "split": 512, "requests": [[1, 4096], [64, 700]]}"#;
    let arguments = [
        "--heads=32/8",
        "--head-dim=192/128",
        "--dtype=f16",
        "--page-size=8",
        "--mask=full",
        "--split=512",
        "--requests=1:4096,64:700",
    ];
    let from_json = plan(&[&["--json", "-"], &MACHINE], all);
    let from_arguments = plan(&[&arguments, &MACHINE], "");
    assert_eq!(printed(&from_json), printed(&from_arguments));
    assert!(printed(&from_json).contains("head_dim 192/128, f16 q/o, f16 KV, NHD, full"));
    assert!(printed(&from_json).contains("keys split: every 512 keys"));

    // The page size appears only in an error.
    let pageless = all.replace("\"page_size\": 8", "\"page_size\": 0");
    let error = error_text(&plan(&[&["--json", "-"], &MACHINE], &pageless), 1);
    assert!(error.contains("page_size = 0"), "{error}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("batch.json");
    let short = r#"{"heads": [32, 8], "head_dim": 128, "requests": [[1, 4096], [1, 4096], [64, 700]]}"#;
    std::fs::write(&file, short).unwrap();
    let from_file = plan(&[&["--json", file.to_str().unwrap()], &MACHINE], "");
    assert_eq!(printed(&from_file), printed(&plan(&[&BATCH, &MACHINE], "")));
}

#[test]
fn split_never_makes_no_merges() {
    let decode = ["--heads=32/8", "--head-dim=128", "--requests=2*1:4096"];
    let output = plan(&[&decode, &MACHINE, &["--split", "never"]], "");
    assert!(printed(&output).contains(" 0 merges\n"), "{}", printed(&output));
    let balanced = plan(&[&decode, &MACHINE], "");
    assert!(!printed(&balanced).contains(" 0 merges\n"), "{}", printed(&balanced));
}

#[test]
fn the_picture_has_one_rectangle_per_work_item_and_one_mark_per_partial_state() {
    let folder = tempfile::tempdir().unwrap();
    let many = (0..40).map(|i| format!("1:{}", i * 131 % 3000 + 1)).collect::<Vec<_>>().join(",");
    let batches: [&[&str]; 3] = [
        &["--heads=32/8", "--head-dim=128", "--requests=2*1:4096,64:700", "--threads=2"],
        &["--heads=4/2", "--head-dim=64", "--requests", &many, "--threads=16", "--split=256"],
        &["--heads=4/2", "--head-dim=64", "--requests=0:0,3:0,1:1", "--threads=1"],
    ];
    for (at, batch) in batches.iter().enumerate() {
        let path = folder.path().join(format!("{at}.svg"));
        let drawn = ["--svg", path.to_str().unwrap(), "--roofline=20/100"];
        let report = plan(&[batch, &drawn], "");
        check_picture(&path, printed(&report));
    }
}

fn check_picture(path: &Path, report: &str) {
    let svg = std::fs::read_to_string(path).unwrap();
    let svg = roxmltree::Document::parse(&svg).unwrap();
    let shapes = |class: &'static str| svg.descendants().filter(move |n| n.attribute("class") == Some(class));
    assert_eq!(shapes("item").count(), count(report, " work item"));
    assert_eq!(shapes("merge").count(), count(report, " merge"));
    // Besides the marks of work items there is one per merge and one in the legend.
    let partial = busy_workers(report).into_iter().map(|worker| worker[2].parse::<usize>().unwrap());
    assert_eq!(shapes("partial").count(), partial.sum::<usize>() + count(report, " merge") + 1);

    let attribute =
        |node: roxmltree::Node<'_, '_>, name| node.attribute(name).unwrap().parse::<f64>().unwrap();
    let (width, height) = (attribute(svg.root_element(), "width"), attribute(svg.root_element(), "height"));
    for rect in svg.descendants().filter(|node| node.has_tag_name("rect")) {
        let [x, y, w, h] = ["x", "y", "width", "height"].map(|name| attribute(rect, name));
        assert!(x >= 0.0 && y >= 0.0 && w > 0.0 && h > 0.0, "{rect:?}");
        assert!(x + w <= width && y + h <= height, "{rect:?} is outside {width} x {height}");
    }
    // Items of a lane are adjacent and do not overlap.
    let items: Vec<_> = shapes("item").collect();
    for pair in items.windows(2).filter(|pair| pair[0].attribute("y") == pair[1].attribute("y")) {
        let gap = attribute(pair[1], "x") - attribute(pair[0], "x") - attribute(pair[0], "width");
        assert!(gap.abs() < 0.02, "{pair:?}");
    }
}

#[test]
fn an_error_in_requests_points_at_the_invalid_part() {
    let output = plan(&[&["--heads=4", "--head-dim=64", "--requests=1:4096,17,64:700"]], "");
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        text(&output.stderr),
        "  × --requests: cannot read `17`
   ╭─[--requests:1:8]
 1 │ 1:4096,17,64:700
   ·        ─┬
   ·         ╰── expected qo_len:kv_len
   ╰────
  help: a request is qo_len:kv_len, and 8*1:4096 is eight of the same: --requests 1:4096,8*1:1024,64:700

"
    );
    let output = plan(&[&["--heads=4", "--head-dim=64", "--requests=1:4k"]], "");
    assert!(error_text(&output, 2).contains("expected kv_len, the number of keys"));
}

#[test]
fn errors_in_a_file_exit_with_1() {
    for (json, words) in [
        ("", "`standard input` is not a batch: EOF while parsing a value"),
        (r#"{"heads": [32, 8], "head_dim": 128"#, "EOF while parsing an object"),
        (r#"{"heads": [32, 8], "head_dim": 128}"#, "missing field `requests`"),
        (r#"{"heads": [32, 8], "head_dim": "x"}"#, "head_dim is neither a number nor two of them"),
        (r#"{"heads": 32}"#, "invalid type: integer `32`, expected an array of length 2"),
        (r#"{"mask": "window"}"#, "unknown variant `window`, expected `causal` or `full`"),
        (r#"{"split": "é"}"#, "split: expected balanced, never, or a number of tokens"),
        (r#"{"threads": 2}"#, "unknown field `threads`, expected one of `heads`, `head_dim`"),
    ] {
        let error = error_text(&plan(&[&["--json", "-"]], json), 1);
        assert!(error.contains(words), "{json}: {error}");
    }
    let error = error_text(&plan(&[&["--json", "no/such/batch.json"]], ""), 1);
    assert!(error.contains("cannot read `no/such/batch.json`"), "{error}");
    let error = error_text(&plan(&[&BATCH, &MACHINE, &["--svg", "no/such/folder.svg"]], ""), 1);
    assert!(error.contains("cannot write `no/such/folder.svg`"), "{error}");
}

#[test]
fn values_out_of_range_are_usage_errors_that_name_the_flag() {
    let cases: [(&[&str], &str); 12] = [
        (
            &["--heads=32/7", "--requests=1:1"],
            "invalid value '32/7' for '--heads <QO/KV>': qo heads = 32 is not a multiple of kv heads = 7",
        ),
        (&["--heads=65537", "--requests=1:1"], "'--heads <QO/KV>': qo heads = 65537 is above 65536"),
        (
            &["--heads", "-4", "--requests=1:1"],
            "invalid value '-4' for '--heads <QO/KV>': expected QO/KV, as in",
        ),
        (
            &["--heads=4", "--requests=1:1", "--page-size=0"],
            "invalid value '0' for '--page-size <TOKENS>': 0 is not at least 1",
        ),
        (
            &["--heads=4", "--requests=1:1", "--page-size", "-16"],
            "invalid value '-16' for '--page-size <TOKENS>': -16 is not at least 1",
        ),
        (
            &["--heads=4", "--requests=1:1", "--split=0"],
            "invalid value '0' for '--split <HOW>': 0 is not at least 1",
        ),
        (
            &["--heads=4", "--requests=70000*1:1"],
            "--requests: the batch has 70000 requests, the most that can be shown is 65536",
        ),
        (
            &["--heads=4", "--requests=1:2147483647", "--page-size=1"],
            "the batch has 2147483647 pages, the most that can be shown is 16777216",
        ),
        (&["--heads=1", "--requests=2147483647:1"], " work items, the most that can be shown is 262144"),
        (&["--heads=32768", "--requests=9*1:1"], "the batch has up to 294912 work items"),
        (&["--heads=64", "--requests=1:16777216", "--split=1"], " work items, the most that can be shown"),
        (&["--heads=4", "--requests=1:1", "--threads", "-1"], "'--threads <COUNT>': -1 is not in 1..=1024"),
    ];
    for (arguments, words) in cases {
        let error = error_text(&plan(&[arguments, &["--head-dim=64"]], ""), 2);
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
    let error = error_text(&plan(&[&["--heads=4", "--head-dim=0", "--requests=1:1"]], ""), 2);
    assert!(error.contains("invalid value '0' for '--head-dim <DIM>': head_dim"), "{error}");
}

#[test]
fn values_out_of_range_in_a_file_exit_with_1() {
    for (json, words) in [
        (
            r#"{"heads": [32, 7], "head_dim": 64, "requests": [[1, 1]]}"#,
            "attention.problem: qo heads = 32 is not a multiple of kv heads = 7",
        ),
        (
            r#"{"heads": [4, 4], "head_dim": 64, "split": 0, "requests": [[1, 1]]}"#,
            "attention.plan: split = 0 tokens, expected at least 1",
        ),
        (
            r#"{"heads": [1, 1], "head_dim": 64, "requests": [[2147483647, 1]]}"#,
            " work items, the most that can be shown is 262144",
        ),
    ] {
        let error = error_text(&plan(&[&["--json", "-"]], json), 1);
        assert!(error.contains(words), "{json}: {error}");
    }
}

#[test]
fn usage_errors_exit_with_2() {
    let cases: [(&[&str], &str); 8] = [
        (&[], "required arguments were not provided: --heads <QO/KV> --head-dim <DIM> --requests <LIST>"),
        (&["--heads=x/8"], "invalid value 'x/8' for '--heads <QO/KV>': expected QO/KV, as in 32/8"),
        (
            &["--head-dim=x"],
            "invalid value 'x' for '--head-dim <DIM>': expected a number, or two as in 192/128",
        ),
        (&["--split=half"], "'--split <HOW>': expected balanced, never, or a number of tokens"),
        (&["--dtype=fp8"], "[possible values: f32, f16, bf16]"),
        (&["--roofline=0/1"], "expected two numbers above 0, as in 200/3000"),
        (&["--threads=0"], "invalid value '0' for '--threads <COUNT>': 0 is not in 1..=1024"),
        (&["--json=-", "--mask=full"], "the argument '--json <FILE>' cannot be used with '--mask <MASK>'"),
    ];
    for (arguments, words) in cases {
        let error = error_text(&plan(&[arguments], ""), 2);
        assert!(error.contains(words), "{arguments:?}: {error}");
    }
}

#[test]
fn examples_in_help_work() {
    let output = plan(&[&["--help"]], "");
    let help = printed(&output).to_owned();
    let json = &help[help.find("{\"heads\"").unwrap()..];
    printed(&plan(&[&["--json", "-"], &MACHINE], json));
    let examples: Vec<&str> =
        help.lines().filter_map(|line| line.trim().strip_prefix("tilewright plan --heads 32")).collect();
    assert_eq!(examples.len(), 2, "{help}");
    let words: Vec<&str> = examples[0].split_whitespace().skip(1).collect();
    printed(&plan(&[&["--heads=32/8"], &words, &MACHINE], ""));
}

/// Files that `cargo xtask fuzz` mutates; those that once failed are among them.
#[test]
fn the_fuzz_corpus_is_planned_or_refused() {
    let corpus = root().join("fuzz/corpus/plan");
    for entry in std::fs::read_dir(corpus).unwrap() {
        let path = entry.unwrap().path();
        let output = plan(&[&["--json", path.to_str().unwrap()]], "");
        assert!(matches!(output.status.code(), Some(0..=2)), "{}: {}", path.display(), text(&output.stderr));
    }
}
