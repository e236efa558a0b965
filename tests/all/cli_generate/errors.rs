//! Rejected input of `tilewright generate`: exit code and exact message, never a panic.

use super::program::{copy, edit, fixture, generate, generate_from, root};
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
fn sampling_parameters_out_of_range_are_rejected() {
    let not = "is not a finite number >= 0";
    assert_rejected(&["--temperature", "-1", "x"], &format!("sampling.params: temperature = -1 {not}"));
    assert_rejected(&["--temperature", "nan", "x"], &format!("sampling.params: temperature = NaN {not}"));
    assert_rejected(&["--top-p", "0", "x"], "sampling.params: top_p = 0 is not in (0, 1]");
    assert_rejected(&["--top-p", "1.5", "x"], "sampling.params: top_p = 1.5 is not in (0, 1]");
    assert_rejected(&["--top-p", "-0.5", "x"], "sampling.params: top_p = -0.5 is not in (0, 1]");
    assert_rejected(&["--top-k", "0", "x"], "sampling.params: top_k = 0 is not at least 1");
    assert_rejected(&["--min-p", "-1", "x"], "sampling.params: min_p = -1 is not in [0, 1]");
}

#[test]
fn sizes_of_zero_are_rejected() {
    assert_rejected(&["--pages", "0", "x"], "engine.new: num_pages = 0, expected at least 1");
    assert_rejected(&["--page-size", "0", "x"], "engine.new: page_size = 0, expected at least 1");
    assert_rejected(&["--chunk", "0", "x"], "engine.new: max_step_tokens = 0, expected at least 1");
    assert_rejected(&["--max-tokens", "0", "x"], "engine.submit: max_tokens = 0, expected at least 1");
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
    assert_rejected(
        &["--pages", "2", "--page-size", &most, "x"],
        &format!("engine.new: 2 pages of {most} tokens need more bytes than can be counted, {end}"),
    );
    // 4 KiB per token
    assert_rejected(
        &["--pages", "99999999999", "x"],
        &format!("engine.new: 99999999999 pages of 16 tokens need 6553599999934464 bytes, {end}"),
    );
}

#[test]
fn invalid_arguments_are_usage_errors() {
    assert_usage_error(&["--n", "0", "x"], "invalid value '0' for '--n <N>': 0 is not in 1..=65536");
    assert_usage_error(
        &["--threads", "0", "x"],
        "invalid value '0' for '--threads <N>': 0 is not in 1..=1024",
    );
    let types = "[possible values: f32, f16, bf16]";
    assert_usage_error(
        &["--dtype", "int8", "x"],
        &format!("invalid value 'int8' for '--dtype <DTYPE>' {types}"),
    );
    let text = format!("invalid value 'fp8' for '--kv-dtype <KV_DTYPE>' {types}");
    assert_usage_error(&["--kv-dtype", "fp8", "x"], &text);
    assert_usage_error(&["--max-tokens", "-1", "x"], "unexpected argument '-1' found");
    assert_usage_error(&["--max-tokens", "many", "x"], "invalid value 'many' for '--max-tokens <N>'");
    assert_usage_error(&[], "the following required arguments were not provided: <PROMPT>");
    let both = "the argument '--batch <FILE>' cannot be used with '[PROMPT]'";
    assert_usage_error(&["--batch", "-", "x"], both);
}

#[test]
fn empty_and_too_long_prompts_are_rejected() {
    let help = "help: give some text to continue: tilewright generate \"It was a dark night, and\"";
    assert_rejected(&[""], &format!("generate: the prompt is empty {help}"));
    let long = "the night ".repeat(1100);
    let run = generate(&[&long]);
    let text = "× engine.submit: the prompt has 2202 tokens, the context 2048: expected at most 2047, to \
                leave room for one";
    assert_eq!((run.code, run.error_line().as_str()), (1, text));
    // the pool may limit the context
    assert_rejected(
        &["--pages", "2", "--page-size", "2", "It was a dark night, and"],
        "engine.submit: the prompt has 8 tokens, the context 4: expected at most 3, to leave room for one",
    );
}

#[test]
fn missing_empty_and_partly_empty_batches_are_rejected() {
    assert_rejected(
        &["--batch", "/nowhere/x"],
        "generate: --batch /nowhere/x: No such file or directory (os error 2)",
    );
    let help = "help: give some text to continue: tilewright generate \"It was a dark night, and\"";
    let error = |input| {
        let run = generate_from(input, &["--batch", "-"]);
        assert_eq!((run.code, run.out.as_str()), (1, ""));
        run.error_line()
    };
    assert_eq!(error(""), "× generate: --batch -: there is no prompt in it");
    assert_eq!(error("one\n\nthree\n"), format!("× generate: line 2 of - is empty {help}"));
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), [b'a', 0xff, b'\n']).expect("written");
    let path = file.path().display().to_string();
    assert_rejected(
        &["--batch", &path],
        &format!("generate: --batch {path}: stream did not contain valid UTF-8"),
    );
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
fn truncated_and_foreign_weights_are_rejected() {
    let dir = copy("llama");
    let file =
        std::fs::File::options().write(true).open(dir.path().join("model.safetensors")).expect("opened");
    file.set_len(500_000).expect("cut");
    assert_folder_rejected(
        &dir,
        "model.weights: DIR/model.safetensors: is truncated: 500000 bytes, expected 520952",
    );
    file.set_len(5).expect("cut");
    assert_folder_rejected(&dir, "model.weights: DIR/model.safetensors: is truncated: 5 bytes, expected 8");

    let dir = copy("llama");
    edit(&dir, "config.json", "\"intermediate_size\": 96", "\"intermediate_size\": 100");
    let text = "model.weights: model.layers.0.mlp.gate_proj.weight has shape [96, 64], expected [100, 64]";
    assert_folder_rejected(&dir, text);
    let dir = copy("llama");
    edit(&dir, "config.json", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4");
    assert_folder_rejected(
        &dir,
        "model.weights: DIR: there is no tensor model.layers.3.input_layernorm.weight",
    );
}

#[test]
fn unsupported_configurations_are_rejected() {
    let dir = copy("llama");
    edit(&dir, "config.json", "\"model_type\": \"llama\"", "\"model_type\": \"gpt2\"");
    assert_folder_rejected(
        &dir,
        "model.config: DIR: model_type = \"gpt2\" is not supported, expected one of llama, mistral, qwen2, qwen3",
    );
    let dir = copy("llama");
    edit(&dir, "config.json", "\"LlamaForCausalLM\"", "\"LlamaForSequenceClassification\"");
    assert_folder_rejected(
        &dir,
        "model.config: DIR: architectures = [\"LlamaForSequenceClassification\"] is not supported, expected \
         [\"LlamaForCausalLM\"]",
    );
    let dir = copy("llama");
    std::fs::write(dir.path().join("config.json"), "{").expect("written");
    let run = generate(&["--model", &dir.path().display().to_string(), "x"]);
    assert!(run.error_line().contains("config.json is not a JSON object: "), "{run:?}");
}

#[test]
fn tokenizers_of_other_models_are_rejected() {
    let dir = copy("llama");
    let other = root().join("models/tilewright-small/tokenizer.json");
    std::fs::copy(other, dir.path().join("tokenizer.json")).expect("copied");
    let run = generate(&["--model", &dir.path().display().to_string(), "x"]);
    let error = run.error_line();
    assert_eq!(run.code, 1);
    assert!(
        error.contains(" the id 4095, the model's vocab_size is 288; the tokenizer belongs to another model")
    );
    let dir = copy("llama");
    std::fs::write(dir.path().join("tokenizer.json"), "[]").expect("written");
    let run = generate(&["--model", &dir.path().display().to_string(), "x"]);
    assert_eq!(run.code, 1);
    assert!(run.error_line().contains("/tokenizer.json is not a tokenizer: "), "{run:?}");
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
