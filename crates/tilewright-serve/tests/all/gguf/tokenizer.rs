//! Tokenizers in GGUF metadata, compared with the `tokenizer.json` that they were written from.

use super::{GgufFile, Meta, convert::add_tokenizer, open};
use crate::fixtures::{folder, read_json};
use serde_json::{Value, json};
use tilewright_serve::model::{Message, Tokenizer};

const TEXTS: [&str; 9] = [
    "",
    "the pages of the tile",
    " two  spaces",
    "naïve 日本 🧱",
    "1 2 34 567",
    "a\n\n b\t c",
    "don't WE'LL",
    "<s> <|im_start|>x<|begin_of_text|>",
    "The tile's pages; and, then: THE END...",
];

/// The `tokenizer.json` at `path` below the fixtures, and a file with the same tokenizer.
fn pair(path: &str, pre: Option<&str>, edit: impl Fn(&mut Value)) -> (Tokenizer, Tokenizer, GgufFile) {
    let mut json = read_json(path);
    edit(&mut json);
    let dir = folder(&[("tokenizer.json", &json.to_string())]);
    let mut file = GgufFile::default();
    file.set("general.architecture", Meta::Text("qwen3".to_owned()));
    add_tokenizer(&mut file, &json, pre);
    let ours = open(&file).1.tokenizer(1024).expect("a tokenizer");
    (Tokenizer::open(dir.path(), 1024).expect("a tokenizer"), ours, file)
}

#[track_caller]
fn assert_equal(expected: &Tokenizer, actual: &Tokenizer) {
    for text in TEXTS {
        for add_special in [false, true] {
            let ids = expected.encode(text, add_special).expect("ids");
            assert_eq!(actual.encode(text, add_special).expect("ids"), ids, "{text:?}");
            assert_eq!(
                actual.decode(&ids).expect("a text"),
                expected.decode(&ids).expect("a text"),
                "{text:?}"
            );
        }
    }
    for id in 0..1024 {
        let token = (expected.token(id), expected.is_special(id));
        assert_eq!((actual.token(id), actual.is_special(id)), token, "{id}");
    }
}

#[test]
fn byte_level_tokenizers_give_the_same_ids() {
    let llama3 = |json: &mut Value| json["model"]["ignore_merges"] = true.into();
    let (expected, actual, _) = pair("llama/tokenizer.json", Some("llama-bpe"), llama3);
    assert_equal(&expected, &actual);
    let (expected, actual, _) = pair("llama/tokenizer.json", Some("dbrx"), |_| {});
    assert_equal(&expected, &actual);
    let qwen2 = |json: &mut Value| {
        let words = &mut json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"];
        *words = words.as_str().expect("an expression").replace("{1,3}", "").into();
    };
    let (expected, actual, _) = pair("qwen2/tokenizer.json", Some("qwen2"), qwen2);
    assert_equal(&expected, &actual);
    let words =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let gpt2 = |json: &mut Value| {
        json["pre_tokenizer"] = words.clone();
        json["normalizer"] = Value::Null;
    };
    let (expected, actual, _) = pair("qwen2/tokenizer.json", Some("gpt-2"), gpt2);
    assert_equal(&expected, &actual);
    let digits = |json: &mut Value| {
        gpt2(json);
        let digits = json!({ "type": "Digits", "individual_digits": true });
        json["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [digits, words] });
    };
    let (expected, actual, _) = pair("qwen2/tokenizer.json", Some("smollm"), digits);
    assert_equal(&expected, &actual);
}

#[test]
fn sentence_piece_tokenizers_give_the_same_ids() {
    let (expected, actual, _) = pair("sentencepiece/replace.json", None, |_| {});
    assert_equal(&expected, &actual);
    let (_, _, mut file) = pair("sentencepiece/replace.json", None, |_| {});
    file.set("tokenizer.ggml.add_space_prefix", Meta::Bool(false));
    let bare = |json: &mut Value| {
        json["normalizer"] = json["normalizer"]["normalizers"][1].clone();
        json["decoder"]["decoders"].as_array_mut().expect("a list").pop();
    };
    let (expected, _, _) = pair("sentencepiece/replace.json", None, bare);
    assert_equal(&expected, &open(&file).1.tokenizer(1024).expect("a tokenizer"));
}

/// `abc` has two overlapping merges; the higher score wins.
#[test]
fn scores_order_the_merges() {
    let tokens = |scores: [f32; 2]| {
        let mut file = GgufFile::default();
        let names = ["<unk>", "a", "b", "c", "ab", "bc"].map(str::to_owned);
        file.set("general.architecture", Meta::Text("llama".to_owned()));
        file.set("tokenizer.ggml.model", Meta::Text("llama".to_owned()));
        file.set("tokenizer.ggml.tokens", Meta::Texts(names.to_vec()));
        file.set("tokenizer.ggml.scores", Meta::F32s([&[0.0, -9.0, -9.0, -9.0][..], &scores].concat()));
        file.set("tokenizer.ggml.token_type", Meta::I32s(vec![2, 1, 1, 1, 1, 1]));
        file.set("tokenizer.ggml.add_bos_token", Meta::Bool(false));
        file.set("tokenizer.ggml.add_space_prefix", Meta::Bool(false));
        open(&file).1.tokenizer(6).expect("a tokenizer").encode("abc", true).expect("ids")
    };
    assert_eq!(tokens([-1.0, -2.0]), [4, 3], "ab, c");
    assert_eq!(tokens([-2.0, -1.0]), [1, 5], "a, bc");
}

#[test]
fn the_chat_template_is_rendered_with_the_special_tokens() {
    let (_, _, mut file) = pair("llama/tokenizer.json", Some("llama-bpe"), |_| {});
    assert!(open(&file).1.chat_template().expect("no template").is_none());
    let template =
        "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}{{ eos_token }}";
    file.set("tokenizer.chat_template", Meta::Text(template.to_owned()));
    file.set("tokenizer.ggml.eos_token_id", Meta::U32(284));
    let chat = open(&file).1.chat_template().expect("a template").expect("a template");
    let text = chat.render(&[Message::new("user", "hello")], true).expect("a prompt");
    assert_eq!(text, "<|begin_of_text|>hello<|end_of_text|>");
}

#[track_caller]
fn assert_rejected(file: &GgufFile, expected: &str) {
    let (dir, gguf) = open(file);
    let error = gguf.tokenizer(1024).expect_err("a bad tokenizer").to_string();
    let path = format!("{}/model.gguf", dir.path().display());
    assert_eq!(error.replace(&path, "FILE"), format!("model.tokenizer: {expected}"));
}

#[test]
fn tokenizers_of_other_kinds_are_rejected() {
    let edit = |key: &str, value: Meta| {
        let (_, _, mut file) = pair("llama/tokenizer.json", Some("llama-bpe"), |_| {});
        file.set(&format!("tokenizer.ggml.{key}"), value);
        file
    };
    let text = |text: &str| Meta::Text(text.to_owned());
    assert_rejected(
        &edit("model", text("t5")),
        "FILE: tokenizer.ggml.model = \"t5\" is not supported, expected \"gpt2\" or \"llama\"",
    );
    assert_rejected(
        &edit("pre", text("tekken")),
        "FILE: tokenizer.ggml.pre = \"tekken\" is not supported, expected one of gpt-2, olmo, smollm, starcoder, refact, llama-bpe, \
         llama3, llama-v3, dbrx, smaug-bpe, qwen2, deepseek-r1-qwen",
    );
    assert_rejected(
        &edit("merges", Meta::Texts(vec!["no merge".to_owned()])),
        "FILE: tokenizer.ggml.merges has \"no merge\", expected two tokens whose union is one",
    );
    assert_rejected(
        &edit("token_type", Meta::I32s(vec![1])),
        "FILE: tokenizer.ggml.token_type has 1 entries, expected 288, one per token",
    );
    assert_rejected(&edit("tokens", Meta::Texts(Vec::new())), "FILE: tokenizer.ggml.tokens is missing");
    assert_rejected(
        &edit("bos_token_id", Meta::U32(288)),
        "FILE: tokenizer.ggml.bos_token_id = 288, expected token ids below vocab_size = 288",
    );
    let (_, _, mut scores) = pair("sentencepiece/replace.json", None, |_| {});
    scores.set("tokenizer.ggml.scores", Meta::F32s(vec![0.0]));
    assert_rejected(&scores, "FILE: tokenizer.ggml.scores has 1 entries, expected 379, one per token");
}
