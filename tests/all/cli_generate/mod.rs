//! `tilewright generate`, run as a process: texts and report.

mod errors;
mod gguf;
mod model_files;
mod output;
mod program;

use crate::{
    fixtures::{FIXTURES, copy, fixture, greedy_tokens, read_json, tokens, transformer},
    output::root,
};
use program::{Run, generate, generate_from};
use tilewright::Dtype;
use tilewright_serve::model::Tokenizer;

const NIGHT: &str = "It was a dark night, and";

#[test]
fn the_bundled_model_continues_with_words() {
    let run = generate(&["--max-tokens", "60", NIGHT]);
    let text = run.text();
    let continuation = text.strip_prefix(NIGHT).expect("the prompt comes first");
    assert!(continuation.is_ascii() && continuation.starts_with(' '), "{text:?}");
    let letters = |c: char| !c.is_alphabetic() && c != '\'';
    let words: Vec<_> = continuation.split(letters).filter(|word| !word.is_empty()).collect();
    assert!(words.len() >= 25 && words.iter().all(|word| word.len() <= 15), "{words:?}");
    let common = ["the", "and", "a", "of", "to", "in", "was", "he", "it", "that", "his", "had"];
    let known = words.iter().filter(|word| common.contains(&word.to_lowercase().as_str())).count();
    assert!(known >= words.len() / 6, "{words:?}");
    assert_report(&run, "prefill   8 tokens in ", "decode    59 tokens in ");
}

/// Checks the lines of a report, in order.
#[track_caller]
fn assert_report(run: &Run, prefill: &str, decode: &str) {
    let lines = run.err.lines().skip_while(|line| !line.starts_with("cpu: "));
    let lines: Vec<_> = lines.filter(|line| !line.starts_with("model     ")).collect();
    let starts = ["cpu: ", prefill, decode, "attention ", "pages     ", "finished  ", "roofline  "];
    assert_eq!(lines.len(), starts.len(), "{}", run.err);
    for (line, start) in lines.iter().zip(starts) {
        assert!(line.starts_with(start), "{line:?} does not begin with {start:?}");
    }
    assert!(lines[1].contains(" tokens/s; ") && lines[1].contains(" bounds it at "), "{}", run.err);
    assert!(lines[3].contains(" % of ") && lines[3].ends_with(" steps"), "{}", run.err);
    assert!(lines[6].contains(" GB/s, ") && lines[6].ends_with(" GFLOP/s (measured now)"), "{}", run.err);
}

#[test]
fn equal_seeds_give_equal_texts_and_different_seeds_different_ones() {
    let text = |seed: &str, threads: &str| {
        let run = generate(&["-q", "--max-tokens", "30", "--seed", seed, "--threads", threads, NIGHT]);
        assert_eq!(run.err, "", "quiet");
        run.text().to_owned()
    };
    assert_eq!(text("5", "1"), text("5", "3"));
    assert_ne!(text("5", "2"), text("6", "2"));
}

#[test]
fn continuations_equal_the_texts_of_consecutive_seeds() {
    let run = generate(&["-q", "--n", "3", "--seed", "20", "--max-tokens", "20", NIGHT]);
    assert_eq!((run.code, run.err.as_str()), (0, ""));
    for (number, seed) in [(1, "20"), (2, "21"), (3, "22")] {
        let alone = generate(&["-q", "--seed", seed, "--max-tokens", "20", NIGHT]);
        let text = format!("[{number}/3] {}\n\n", alone.text());
        assert!(run.out.contains(&text), "{:?} has no {text:?}", run.out);
    }
}

#[test]
fn a_batch_has_the_texts_of_its_lines() {
    let (first, second) = ("The old man", "She opened the letter and");
    let lines = format!("{first}\n{second}\n");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), &lines).expect("written");
    let path = file.path().display().to_string();
    let from_file = generate(&["-q", "--max-tokens", "20", "--batch", &path]);
    let from_input = generate_from(&lines, &["-q", "--max-tokens", "20", "--batch", "-"]);
    for (number, prompt) in [(1, first), (2, second)] {
        let alone = generate(&["-q", "--max-tokens", "20", prompt]);
        let text = format!("[{number}/2] {}\n\n", alone.text());
        assert!(from_file.out.contains(&text), "{:?} has no {text:?}", from_file.out);
    }
    assert_eq!((from_file.code, &from_file.out), (from_input.code, &from_input.out));
}

#[test]
fn a_prompt_of_1000_tokens_with_8_continuations_is_computed_once() {
    let dir = root().join("models/tilewright-small");
    let tokenizer = Tokenizer::open(&dir, 4096).expect("a tokenizer");
    let len = |words: usize| tokenizer.encode(&text(words), true).expect("tokens").len();
    fn text(words: usize) -> String {
        ["the", "night", "was", "dark", "and"].into_iter().cycle().take(words).collect::<Vec<_>>().join(" ")
    }
    let words = (500..=1000).rev().find(|&words| len(words) == 1000).expect("about one token per word");
    let run = generate(&["--n", "8", "--max-tokens", "4", &text(words)]);
    assert_report(&run, "prefill   1000 tokens in ", "decode    24 tokens in ");
    let pages =
        "pages     70 of 512 used at most, 434 reused (7000 tokens not computed again), 0 preemptions";
    assert!(run.err.contains(pages), "{}", run.err);
}

#[test]
fn chunk_page_and_reuse_options_take_effect() {
    let common = ["--chunk", "4", "--page-size", "4", "--max-tokens", "5", "--batch", "-"];
    let lines = format!("{NIGHT}\n{NIGHT}\n");
    // the first prompt fills two steps with its 8 tokens; then the second reuses its first page
    let run = generate_from(&lines, &[&common[..], &["--pages", "33"]].concat());
    assert_report(&run, "prefill   12 tokens in ", "decode    8 tokens in ");
    assert!(run.err.contains(" of 33 used at most, 1 reused (4 tokens not computed again)"), "{}", run.err);
    let run = generate_from(&lines, &[&common[..], &["--no-prefix-reuse"]].concat());
    assert_report(&run, "prefill   16 tokens in ", "decode    8 tokens in ");
    assert!(run.err.contains(" 0 reused (0 tokens not computed again)"), "{}", run.err);
    let run = generate(&["--chunk", "3", "--max-tokens", "4", NIGHT]);
    assert!(run.err.contains(" in 6 steps\n"), "three for the prompt: {}", run.err);
}

#[test]
fn the_context_limits_a_huge_max_tokens() {
    let most = usize::MAX.to_string();
    // ten pages of four tokens are a context of forty
    let run = generate(&["--max-tokens", &most, "--pages", "10", "--page-size", "4", "--seed", "3", NIGHT]);
    assert_report(&run, "prefill   8 tokens in ", "decode    31 tokens in ");
}

/// A fixture's `expected.json`.
fn expected(name: &str) -> serde_json::Value {
    read_json(&format!("{name}/expected.json"))
}

/// The program's 64 greedy tokens after `prompt`, as text.
fn greedy_text(name: &str, arguments: &[&str], prompt: &str) -> String {
    let dir = fixture(name).display().to_string();
    let greedy = ["--temperature", "0", "--max-tokens", "64", "-q", "--model", &dir, prompt];
    let run = generate(&[arguments, &greedy].concat());
    run.text().strip_prefix(prompt).expect("the prompt comes first").to_owned()
}

#[test]
fn texts_equal_those_of_the_library() {
    for name in FIXTURES {
        let case = &expected(name)["encode"][2];
        let text = case["text"].as_str().expect("a text");
        let model = transformer(&fixture(name), Some(Dtype::F32));
        let tokenizer = Tokenizer::open(&fixture(name), model.config().vocab_size).expect("a tokenizer");
        let ends = model.config().eos_token_ids.clone();
        let generated = greedy_tokens(model, 512, &tokens(&case["with_special"]), 64);
        let before_end: Vec<u32> = generated.into_iter().take_while(|token| !ends.contains(token)).collect();
        let wanted = tokenizer.decode(&before_end).expect("a text");
        assert_eq!(greedy_text(name, &["--dtype", "f32"], text), wanted, "{name}");
    }
}

#[test]
fn the_end_token_of_a_model_ends_its_text() {
    let expected = expected("llama");
    let tokenizer = Tokenizer::open(&fixture("llama"), 288).expect("a tokenizer");
    let greedy = tokens(&expected["greedy"]["tokens"]);
    let dir = copy("llama");
    let end = format!("{{\"eos_token_id\": {}}}", greedy[3]);
    std::fs::write(dir.path().join("generation_config.json"), end).expect("written");
    let prompt = tokenizer.decode(&tokens(&expected["prompt"])).expect("a text");
    let path = dir.path().display().to_string();
    let run = generate(&["-q", "--temperature", "0", "--model", &path, &prompt]);
    assert_eq!(run.text(), prompt + &tokenizer.decode(&greedy[..4]).expect("a text"));
}

/// Only Llama: the prompts of the Qwen fixtures end inside a character, which an argument cannot; the library tests cover them.
#[test]
fn texts_equal_those_of_transformers_in_each_dtype() {
    let expected = expected("llama");
    let tokenizer = Tokenizer::open(&fixture("llama"), 288).expect("a tokenizer");
    let text = |value: &serde_json::Value| tokenizer.decode(&tokens(value)).expect("a text");
    let (prompt, exact) = (text(&expected["prompt"]), text(&expected["greedy"]["tokens"]));
    assert_eq!(exact, expected["decode_greedy"]);
    assert_eq!(greedy_text("llama", &[], &prompt), exact);
    assert_eq!(greedy_text("llama", &["--dtype", "f32"], &prompt), exact);
    let rounded = text(&expected["greedy_bf16_weights"]["tokens"]);
    assert_eq!(greedy_text("llama", &["--dtype", "bf16", "--kv-dtype", "f32"], &prompt), rounded);
    assert_ne!(exact, rounded);
}

#[test]
fn a_chat_template_wraps_the_prompt() {
    let dir = fixture("qwen3").display().to_string();
    let common = ["-q", "--temperature", "0", "--max-tokens", "16", "--model", &dir, "the pages"];
    let plain = generate(&common);
    let chat = generate(&[&["--chat"], &common[..]].concat());
    assert_ne!(chat.text(), plain.text());
    assert!(plain.text().starts_with("the pages") && !chat.text().contains("the pages"), "the answer alone");
}

#[test]
fn nan_logits_fail_one_text_and_the_others_are_printed() {
    let dir = copy("llama");
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("the weights");
    let offset = tensor_offset(&bytes, "model.embed_tokens.weight");
    // the token of `~`, which only one prompt has
    let tokenizer = Tokenizer::open(dir.path(), 288).expect("a tokenizer");
    let poison = tokenizer.id("~").expect("a token") as usize;
    for element in 0..64 {
        bytes[offset + 4 * (64 * poison + element)..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    }
    std::fs::write(path, bytes).expect("written");
    let dir = dir.path().display().to_string();
    let arguments = ["-q", "--temperature", "0", "--max-tokens", "5", "--model", &dir];
    let run = generate_from("the pages\na ~ b\nthe wright\n", &[&arguments[..], &["--batch", "-"]].concat());
    assert_eq!(run.code, 1);
    let failure = "generate: line 2 of standard input: logits hold NaN at token 0";
    assert_eq!(run.error_line(), format!("{failure} × generate: 1 of 3 texts failed"));
    // the second text ends first and is printed second
    let texts = ["[1/3] the pages", "[2/3] a ~ b\n\n", "[3/3] the wright"].map(|text| run.out.find(text));
    assert!(texts.is_sorted() && texts[0] == Some(0), "{texts:?} in {:?}", run.out);
}

/// The byte offset of a tensor's data in a safetensors file.
fn tensor_offset(bytes: &[u8], tensor: &str) -> usize {
    let header = u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).expect("a header");
    8 + header + json[tensor]["data_offsets"][0].as_u64().expect("an offset") as usize
}
