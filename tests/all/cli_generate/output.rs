//! Output of `tilewright generate`: finish reasons, JSON, batches with invalid lines, piped prompts, and Ctrl-C.

use super::{
    NIGHT,
    program::{Run, command, edit, generate, generate_bytes, generate_from},
};
use crate::{
    fixtures::{copy, fixture},
    output::root,
};
use std::{
    io::Read,
    process::{Child, Command},
};

/// The JSON objects of a run.
#[track_caller]
fn records(run: &Run) -> Vec<serde_json::Value> {
    run.out.lines().map(|line| serde_json::from_str(line).expect("an object per line")).collect()
}

/// The line of the report with the finish reasons.
#[track_caller]
fn finished(run: &Run) -> &str {
    let line = run.err.lines().find_map(|line| line.strip_prefix("finished  "));
    line.unwrap_or_else(|| panic!("no finish reasons in {:?}", run.err))
}

#[test]
fn finish_reasons_are_in_the_report_and_in_json() {
    let dir = copy("llama");
    let path = dir.path().display().to_string();
    let run_in = |path: &str, arguments: &[&str]| {
        let common = ["--json", "--temperature", "0", "--model", path, "the pages"];
        let run = generate(&[arguments, &common].concat());
        assert_eq!(run.code, 0, "{run:?}");
        let reason = records(&run)[0]["finish_reason"].as_str().expect("a reason").to_owned();
        (finished(&run).to_owned(), reason)
    };
    let run = |arguments: &[&str]| run_in(&path, arguments);
    let both = |report: &str, name: &str| (report.to_owned(), name.to_owned());
    assert_eq!(run(&["--max-tokens", "5"]), both("1 length (--max-tokens)", "length"));
    assert_eq!(run(&["--pages", "3", "--page-size", "4"]), both("1 pages (--pages)", "pages"));
    let short = copy("llama");
    edit(&short, "config.json", "\"max_position_embeddings\": 512", "\"max_position_embeddings\": 10");
    let context = run_in(&short.path().display().to_string(), &["--max-tokens", "9999"]);
    assert_eq!(context, both("1 context (the model's maximum)", "context"));
    // the fifth greedy token as the end token
    let five =
        generate(&["--json", "--temperature", "0", "--max-tokens", "5", "--model", &path, "the pages"]);
    let end = format!("{{\"eos_token_id\": {}}}", records(&five)[0]["tokens"][4]);
    std::fs::write(dir.path().join("generation_config.json"), end).expect("written");
    assert_eq!(run(&[]), both("1 stop", "stop"));
}

#[test]
fn json_has_one_object_per_continuation() {
    let arguments = ["--n", "2", "--seed", "7", "--max-tokens", "6"];
    let run =
        generate_from("The old man\n\nShe said\n", &[&arguments[..], &["--json", "--batch", "-"]].concat());
    assert_eq!(run.code, 1, "line 2 is empty");
    let records = records(&run);
    let key = |record: &serde_json::Value| ["index", "continuation"].map(|name| record[name].as_u64());
    let keys: Vec<_> = records.iter().map(key).collect();
    let expected = [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]].map(|pair| pair.map(Some));
    assert_eq!(keys, expected, "in the order of the input");
    for record in &records[2..4] {
        assert_eq!(
            (&record["finish_reason"], &record["error"]),
            (&"failed".into(), &"the prompt is empty".into())
        );
        assert_eq!((&record["text"], record["tokens"].as_array().map(Vec::len)), (&"".into(), Some(0)));
        assert!(record["prompt_tokens"].is_null() && record["timings"]["first_token_seconds"].is_null());
    }
    for record in [&records[0], &records[1], &records[4], &records[5]] {
        let prompt = record["prompt"].as_str().expect("a prompt");
        let seed = record["seed"].to_string();
        let alone = generate(&["-q", "--seed", &seed, "--max-tokens", "6", prompt]);
        assert_eq!(
            Some(alone.text()),
            record["text"].as_str().map(|text| format!("{prompt}{text}")).as_deref()
        );
        assert_eq!(
            (record["tokens"].as_array().map(Vec::len), &record["finish_reason"]),
            (Some(6), &"length".into())
        );
        assert!(record["error"].is_null() && record["prompt_tokens"].as_u64() > Some(1));
        let [first, all] = ["first_token_seconds", "seconds"].map(|name| record["timings"][name].as_f64());
        assert!(first > Some(0.0) && first < all, "{record}");
    }
}

#[test]
fn an_invalid_line_is_reported_with_its_number_and_does_not_stop_the_others() {
    let long = "the night ".repeat(1100);
    let mut input = format!("The old man\n\n{long}\n").into_bytes();
    input.extend(b"\xff\xfe\nShe said\n");
    let run = generate_bytes(&input, &["-q", "--max-tokens", "5", "--batch", "-"]);
    assert_eq!(run.code, 1);
    let blocks: Vec<_> = run.out.split_terminator("\n\n").map(|block| block.get(..9)).collect();
    assert_eq!(blocks, [Some("[1/5] The"), Some("[5/5] She")], "{:?}", run.out);
    let errors: Vec<_> = run.err.lines().collect();
    let expected = [
        "generate: line 2 of standard input: the prompt is empty",
        "generate: line 3 of standard input: the prompt has 2202 tokens, the context 2048: expected at most 2047, \
         to leave room for one",
        "generate: line 4 of standard input: the prompt is not valid UTF-8: invalid utf-8 sequence of 1 bytes from \
         index 0",
        "  × generate: 3 of 5 texts failed",
        "",
    ];
    assert_eq!(errors, expected);
}

#[test]
fn texts_are_in_the_order_of_the_input() {
    let dir = fixture("llama").display().to_string();
    // In chunks of 4 tokens, the short second prompt would finish before the first one without an order.
    let input = format!("{}\nthe\n", "the pages ".repeat(20));
    let arguments =
        ["-q", "--temperature", "0", "--max-tokens", "3", "--pages", "12", "--model", &dir, "--n", "5"];
    let run = generate_from(&input, &[&arguments[..], &["--batch", "-"]].concat());
    let numbers: Vec<_> =
        run.out.split("\n\n").filter_map(|block| block.split_once("/10] ")).map(|b| b.0).collect();
    let expected: Vec<_> = (1..=10).map(|number| format!("[{number}")).collect();
    assert_eq!(numbers, expected, "{}", run.out);
}

#[test]
fn a_piped_text_is_the_prompt() {
    let expected = generate(&["-q", "--max-tokens", "10", NIGHT]);
    for input in [NIGHT.to_owned(), format!("{NIGHT}\n"), format!("\u{feff}{NIGHT}\r\n")] {
        let run = generate_from(&input, &["-q", "--max-tokens", "10"]);
        assert_eq!(run.text(), expected.text(), "{input:?}");
    }
    // several lines are one prompt
    let run = generate_from("The old\nman\n", &["-q", "--max-tokens", "1"]);
    assert!(run.text().starts_with("The old\nman"), "{run:?}");
}

#[test]
fn a_byte_order_mark_is_not_part_of_a_batch() {
    let plain = generate_from("The old man\nShe said\n", &["-q", "--max-tokens", "4", "--batch", "-"]);
    let marked =
        generate_from("\u{feff}The old man\r\nShe said\r\n", &["-q", "--max-tokens", "4", "--batch", "-"]);
    assert_eq!((plain.code, plain.out), (0, marked.out));
}

#[test]
fn more_threads_than_cores_are_a_warning() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let warned = |threads: usize| {
        let run = generate(&["--threads", &threads.to_string(), "--max-tokens", "1", "x"]);
        assert_eq!(run.code, 0, "{run:?}");
        run.err.starts_with(&format!("warning: --threads {threads} is above the {cores} core"))
    };
    assert_eq!([cores, cores + 1].map(warned), [false, true]);
}

#[test]
fn help_and_readme_name_every_supported_family_and_what_is_refused() {
    let dir = copy("llama");
    std::fs::write(dir.path().join("config.json"), "{\"model_type\": \"gpt2\"}").expect("written");
    let error = generate(&["--model", &dir.path().display().to_string(), "x"]).error_line();
    let families = error.rsplit_once("expected one of ").expect("a list of families").1;
    let help = generate(&["--help"]).out;
    let readme = std::fs::read_to_string(root().join("README.md")).expect("a text");
    let letters = |text: &str| -> String { text.chars().filter(|c| c.is_alphanumeric()).collect() };
    for text in [help, readme.replace("Gemma 2 and 3", "Gemma 2, Gemma 3")] {
        let words = letters(&text.to_lowercase());
        // only the help tells which of the Gemma 3 models it is
        for family in families.split(", ").map(|family| letters(family.trim_end_matches("_text"))) {
            assert!(words.contains(&family), "{family} is not in {text}");
        }
        for refused in ["mixturesofexperts", "mlamodels", "quantizedweights", "arerefused"] {
            assert!(words.contains(refused), "{refused} is not in {text}");
        }
    }
}

/// Presses Ctrl-C after the first byte of a run's output; returns exit code, output and standard error.
fn interrupt(child: &mut Child) -> (Option<i32>, String, String) {
    let mut out = child.stdout.take().expect("a pipe");
    let mut text = vec![0];
    out.read_exact(&mut text).expect("some text before the end");
    // the shell's own `kill`, which every system has
    let kill = Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status();
    assert!(kill.expect("a shell").success());
    out.read_to_end(&mut text).expect("the rest");
    let mut err = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut err).expect("text");
    let code = child.wait().expect("the program ends").code();
    (code, String::from_utf8(text).expect("text"), err)
}

#[test]
fn ctrl_c_ends_with_the_text_so_far_and_the_report() {
    let mut child =
        command(&["--max-tokens", "9999", "--seed", "3", "--threads", "1", NIGHT]).spawn().expect("started");
    let (code, out, err) = interrupt(&mut child);
    assert_eq!(code, Some(130), "{err}");
    assert!(out.starts_with(NIGHT) && out.ends_with('\n') && out.len() > NIGHT.len() + 1, "{out:?}");
    assert!(err.lines().any(|line| line == "finished  1 interrupted"), "{err}");
}

#[test]
fn ctrl_c_keeps_the_finished_and_the_partial_texts_of_a_batch() {
    // The empty line is reported at once; the other lines take a while.
    let dir = fixture("llama").display().to_string();
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), format!("\n{}", "the pages\n".repeat(200))).expect("written");
    let path = file.path().display().to_string();
    let arguments = ["--json", "--max-tokens", "9999", "--threads", "1", "--model", &dir, "--batch", &path];
    let mut child = command(&arguments).spawn().expect("started");
    let (code, out, err) = interrupt(&mut child);
    assert_eq!(code, Some(1), "line 1 is empty: {err}");
    let reason = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).expect("an object per line");
        record["finish_reason"].as_str().expect("a reason").to_owned()
    };
    let reasons: Vec<_> = out.lines().map(reason).collect();
    assert_eq!((reasons.len(), reasons[0].as_str()), (201, "failed"));
    assert!(reasons.iter().any(|reason| reason == "interrupted"), "{reasons:?}");
    assert!(err.contains("1 failed, ") && err.contains(" interrupted\n"), "the report: {err}");
}
