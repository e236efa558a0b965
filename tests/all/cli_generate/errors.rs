//! Rejected input of `tilewright generate`: exit code and exact message, never a panic. The tests of `tilewright-serve` have the
//! other errors of models.

use super::program::{generate, generate_from};
use crate::fixtures::{copy, fixture};
use tempfile::TempDir;

/// `generate` fails with exit code 1 and this message.
#[track_caller]
fn assert_rejected(arguments: &[&str], expected: &str) {
    let run = generate(arguments);
    assert_eq!((run.code, run.out.as_str()), (1, ""), "{arguments:?}: {run:?}");
    assert_eq!(run.error_line(), format!("× {expected}"), "{arguments:?}");
}

/// `generate` fails with a usage error: exit code 2 and a message with this prefix.
#[track_caller]
fn assert_usage_error(arguments: &[&str], expected: &str) {
    let run = generate(arguments);
    assert_eq!((run.code, run.out.as_str()), (2, ""), "{arguments:?}: {run:?}");
    let error = run.error_line();
    assert!(error.starts_with(&format!("error: {expected}")), "{arguments:?}: {error}");
}

/// The model in `dir` is rejected with this message, where `DIR` stands for its path.
#[track_caller]
fn assert_folder_rejected(dir: &TempDir, expected: &str) {
    let path = dir.path().display().to_string();
    let run = generate(&["--model", &path, "the pages"]);
    assert_eq!((run.code, run.out.as_str()), (1, ""), "{run:?}");
    assert_eq!(run.error_line().replace(&path, "DIR"), format!("× {expected}"));
}

#[test]
fn values_out_of_range_are_usage_errors_that_name_the_flag() {
    for (flag, value, expected) in [
        ("--temperature <T>", "-1", "expected a finite number >= 0"),
        ("--temperature <T>", "nan", "expected a finite number >= 0"),
        ("--top-p <P>", "0", "expected a number in (0, 1]"),
        ("--top-p <P>", "1.5", "expected a number in (0, 1]"),
        ("--top-p <P>", "-0.5", "expected a number in (0, 1]"),
        ("--top-k <K>", "0", "0 is not at least 1"),
        ("--min-p <P>", "-1", "expected a number in [0, 1]"),
        ("--pages <N>", "0", "0 is not at least 1"),
        ("--page-size <N>", "0", "0 is not at least 1"),
        ("--chunk <N>", "0", "0 is not at least 1"),
        ("--max-tokens <N>", "0", "0 is not at least 1"),
        ("--max-tokens <N>", "-1", "-1 is not at least 1"),
        ("--max-tokens <N>", "many", "expected an integer, at least 1"),
        ("--seed <SEED>", "-1", "-1 is not in 0..=18446744073709551615"),
        ("--n <N>", "0", "0 is not in 1..=65536"),
        ("--n <N>", "-3", "-3 is not in 1..=65536"),
        ("--threads <N>", "0", "0 is not in 1..=1024"),
        ("--threads <N>", "-2", "-2 is not in 1..=1024"),
    ] {
        let name = flag.split(' ').next().expect("a flag");
        assert_usage_error(&[name, value, "x"], &format!("invalid value '{value}' for '{flag}': {expected}"));
    }
}

#[test]
fn missing_devices_are_rejected() {
    assert_usage_error(
        &["--device", "gpu", "x"],
        "invalid value 'gpu' for '--device <DEVICE>': expected cpu, cuda or cuda:N",
    );
    assert_usage_error(
        &["--activations", "e4m3", "x"],
        "invalid value 'e4m3' for '--activations <ACTIVATIONS>'",
    );
    // the driver's error, on one line
    let why = tilewright_cuda::Device::open(4096).expect_err("fewer than 4097 GPUs").to_string();
    assert!(!why.contains('\n'), "{why}");
    assert_rejected(&["--device", "cuda:4096", "x"], &why);
}

#[test]
fn sizes_larger_than_memory_are_rejected() {
    let most = usize::MAX.to_string();
    let end = "which this machine does not give";
    let help = "help: --pages and --page-size set the size of the KV cache";
    assert_rejected(
        &["--pages", "2", "--page-size", &most, "x"],
        &format!("engine.new: 2 pages of {most} tokens need more bytes than can be counted, {end} {help}"),
    );
    // 4 KiB per token
    assert_rejected(
        &["--pages", "99999999999", "x"],
        &format!("engine.new: 99999999999 pages of 16 tokens need 6553599999934464 bytes, {end} {help}"),
    );
}

#[test]
fn invalid_arguments_are_usage_errors() {
    let types = "[possible values: f32, f16, bf16]";
    assert_usage_error(
        &["--dtype", "int8", "x"],
        &format!("invalid value 'int8' for '--dtype <DTYPE>' {types}"),
    );
    let text = format!("invalid value 'fp8' for '--kv-dtype <KV_DTYPE>' {types}");
    assert_usage_error(&["--kv-dtype", "fp8", "x"], &text);
    let both = "the argument '--batch <FILE>' cannot be used with '[PROMPT]'";
    assert_usage_error(&["--batch", "-", "x"], both);
}

#[test]
fn empty_and_too_long_prompts_are_rejected() {
    let help = "help: give some text to continue: tilewright generate \"It was a dark night, and\"";
    assert_rejected(&[""], &format!("generate: the prompt is empty {help}"));
    let long = "the night ".repeat(1100);
    let run = generate(&[&long]);
    let text = "× generate: the prompt has 2202 tokens, the context 2048: expected at most 2047, to \
                leave room for one";
    assert_eq!((run.code, run.error_line().as_str()), (1, text));
    // the pool may limit the context
    assert_rejected(
        &["--pages", "2", "--page-size", "2", "It was a dark night, and"],
        "generate: the prompt has 8 tokens, 2 pages of 2 tokens hold 4: expected at most 3, to leave room for one",
    );
}

#[test]
fn missing_and_empty_batches_are_rejected() {
    assert_rejected(
        &["--batch", "/nowhere/x"],
        "generate: --batch /nowhere/x: No such file or directory (os error 2)",
    );
    for input in ["", "\u{feff}"] {
        let run = generate_from(input, &["--batch", "-"]);
        assert_eq!((run.code, run.out.as_str()), (1, ""));
        assert_eq!(run.error_line(), "× generate: --batch -: there is no prompt in it");
    }
}

#[test]
fn a_missing_prompt_is_a_usage_error_that_lists_the_sources() {
    for input in ["", "\n", "\u{feff}\r\n"] {
        let run = generate_from(input, &[]);
        assert_eq!((run.code, run.out.as_str()), (2, ""), "{run:?}");
        let help = "help: give a PROMPT, a file of prompts with --batch FILE, or a text on standard input";
        assert_eq!(run.error_line(), format!("× generate: there is no prompt {help}"));
    }
}

#[test]
fn messages_in_a_pipe_are_one_line() {
    let run = generate(&[
        "--model",
        "/a-folder-with-hyphens/whose-name-is-so-long/that-it-would-be/wrapped-twice",
        "x",
    ]);
    let text = "  × model.config: /a-folder-with-hyphens/whose-name-is-so-long/that-it-would-be/wrapped-twice: \
                there is no such folder\n\n";
    assert_eq!((run.code, run.err.as_str()), (1, text));
}

#[test]
fn missing_folders_and_files_are_rejected() {
    assert_rejected(&["--model", "/nowhere", "x"], "model.config: /nowhere: there is no such folder");
    for (file, name, expected) in [
        ("config.json", "llama", "model.config: DIR: there is no config.json"),
        ("tokenizer.json", "llama", "model.tokenizer: DIR: there is no tokenizer.json"),
        (
            "model.safetensors",
            "llama",
            "model.weights: DIR: there is neither model.safetensors nor model.safetensors.index.json",
        ),
        (
            "model-00002-of-00003.safetensors",
            "qwen2",
            "model.weights: DIR: model.safetensors.index.json names model-00002-of-00003.safetensors, which is \
             missing",
        ),
    ] {
        let dir = copy(name);
        std::fs::remove_file(dir.path().join(file)).expect("removed");
        assert_folder_rejected(&dir, expected);
    }
}

#[test]
fn a_chat_without_a_template_is_rejected() {
    let dir = copy("qwen3");
    std::fs::remove_file(dir.path().join("chat_template.jinja")).expect("removed");
    let path = dir.path().display().to_string();
    let help = "help: leave --chat away to continue the prompt as it is";
    assert_rejected(
        &["--chat", "--model", &path, "x"],
        &format!("generate: {path} has no chat template {help}"),
    );
    assert!(fixture("qwen3").join("chat_template.jinja").exists());
}
