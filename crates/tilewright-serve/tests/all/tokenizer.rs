//! Tokenizers and chat templates compared with `transformers`, and streaming compared with decoding at once.

use crate::{
    fixtures::{FIXTURES, fixture, folder, messages, read_json, tokens},
    generator::Generator,
};
use serde_json::{Value, json};
use std::path::Path;
use tilewright_serve::model::{ChatTemplate, Message, ModelConfig, Tokenizer};

fn expected(name: &str) -> Value {
    read_json(&format!("{name}/expected.json"))
}

fn open(name: &str) -> Tokenizer {
    let config = ModelConfig::open(&fixture(name)).unwrap();
    Tokenizer::open(&fixture(name), config.vocab_size).unwrap()
}

/// The pieces of streaming detokenization, the last one included.
fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut decoder = tokenizer.decoder();
    let mut pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    pieces.push(decoder.finish().unwrap());
    pieces
}

/// A SentencePiece-style tokenizer: spaces as `▁`, unknown characters as byte tokens.
fn sentencepiece() -> Tokenizer {
    let words = ["<unk>", "<s>", "</s>", "▁", "▁tile", "a", "é", "▁and"];
    let mut vocab: serde_json::Map<String, Value> =
        words.iter().zip(0..).map(|(w, i)| (w.to_string(), json!(i))).collect();
    vocab.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(8 + byte))));
    let special = |id: u32| {
        json!({ "id": id, "content": words[id as usize], "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true })
    };
    let file = json!({
        "version": "1.0",
        "added_tokens": [special(0), special(1), special(2)],
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 }
        ] },
        "model": { "type": "BPE", "unk_token": "<unk>", "byte_fallback": true, "vocab": vocab, "merges": [] }
    });
    let dir = folder(&[("tokenizer.json", &file.to_string())]);
    Tokenizer::open(dir.path(), 264).unwrap()
}

#[test]
fn ids_equal_those_of_transformers() {
    for name in FIXTURES {
        let (tokenizer, expected) = (open(name), expected(name));
        for case in expected["encode"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let plain = tokenizer.encode(text, false).unwrap();
            assert_eq!(plain, tokens(&case["ids"]), "{name}: {text:?}");
            assert_eq!(
                tokenizer.encode(text, true).unwrap(),
                tokens(&case["with_special"]),
                "{name}: {text:?}"
            );
            assert_eq!(tokenizer.decode(&plain).unwrap(), case["decoded"].as_str().unwrap());
        }
        let greedy = tokens(&expected["greedy"]["tokens"]);
        assert_eq!(tokenizer.decode(&greedy).unwrap(), expected["decode_greedy"].as_str().unwrap());
    }
}

#[test]
fn tokens_map_to_spellings() {
    let llama = open("llama");
    assert_eq!((llama.eos_id(), llama.id("<|eot_id|>"), llama.id("no such")), (Some(287), Some(287), None));
    assert_eq!(llama.token(283).as_deref(), Some("<|begin_of_text|>"));
    assert!(llama.is_special(283) && !llama.is_special(0));
    // Padding ids have no token and decode to nothing.
    let qwen2 = open("qwen2");
    assert_eq!((qwen2.token(295), qwen2.decode(&[295, 83]).unwrap()), (None, "t".to_owned()));
}

#[test]
fn characters_are_emitted_whole() {
    let tokenizer = open("qwen3");
    let brick = tokenizer.encode("🧱é", false).unwrap();
    assert_eq!(brick.len(), 6, "the alphabet is bytes");
    assert_eq!(stream(&tokenizer, &brick), ["", "", "", "🧱", "", "é", ""]);
    // Eleven bytes, repeated so that the stream's window starts at each of them.
    let text = "日🧱éé".repeat(40);
    let bytes = tokenizer.encode(&text, false).unwrap();
    assert_eq!((bytes.len(), stream(&tokenizer, &bytes).concat()), (440, text));
    // Truncated at the end, and truncated by another token.
    assert_eq!(stream(&tokenizer, &brick[..2]), ["", "", "\u{fffd}"]);
    assert_eq!(stream(&tokenizer, &[brick[0], brick[1], 83]), ["", "", "\u{fffd}t", ""]);
    // A special token emits nothing and does not split a character.
    let end = tokenizer.id("<|im_end|>").unwrap();
    assert_eq!(stream(&tokenizer, &[brick[4], end, brick[5]]), ["", "", "é", ""]);
}

#[test]
fn byte_tokens_are_emitted_as_a_run() {
    let tokenizer = sentencepiece();
    let byte = |b: u32| 8 + b;
    assert_eq!(
        stream(&tokenizer, &[1, 4, 7, byte(0xE2), byte(0x82), byte(0xAC), 5, 2]),
        ["", "tile", " and", "", "", "", "€a", "", ""]
    );
    // One invalid byte invalidates the whole run, the `A` before it included.
    let spoiled = [4, byte(0x41), byte(0xE2), 5];
    assert_eq!(stream(&tokenizer, &spoiled), ["tile", "", "", "\u{fffd}\u{fffd}a", ""]);
    assert_eq!(stream(&tokenizer, &spoiled[..3]).concat(), tokenizer.decode(&spoiled[..3]).unwrap());
}

#[test]
fn concatenated_pieces_equal_the_text_decoded_at_once() {
    let mut generator = Generator::new(7);
    for tokenizer in [open("llama"), open("qwen2"), sentencepiece()] {
        for round in 0..300 {
            let length = generator.below(100);
            // Every other round uses few tokens, which makes runs of incomplete characters and of spaces likely.
            let among = if round % 2 == 0 { 264 } else { 12 };
            let first = if round % 2 == 0 { 0 } else { generator.below(252) };
            let ids: Vec<u32> =
                (0..length).map(|_| (first + generator.below(among)) as u32).map(|id| id % 264).collect();
            let pieces = stream(&tokenizer, &ids);
            assert_eq!(pieces.concat(), tokenizer.decode(&ids).unwrap(), "{tokenizer:?} {ids:?}");
        }
    }
    for name in FIXTURES {
        let greedy = tokens(&expected(name)["greedy"]["tokens"]);
        assert_eq!(stream(&open(name), &greedy).concat(), expected(name)["decode_greedy"].as_str().unwrap());
    }
}

/// The automaton of the `tokenizers` crate takes seconds for a repetitive token of 12 KB.
#[test]
fn long_added_tokens_are_rejected() {
    let whole = std::fs::read_to_string(fixture("qwen3").join("tokenizer.json")).unwrap();
    let mut file: Value = serde_json::from_str(&whole).unwrap();
    let mut open = |len: usize| {
        file["added_tokens"][0]["content"] = json!("x".repeat(len));
        let dir = folder(&[("tokenizer.json", &file.to_string())]);
        Tokenizer::open(dir.path(), 288).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(open(256), Ok(()));
    let error = open(257).unwrap_err();
    assert!(error.ends_with("added_tokens has a token of 257 bytes, expected at most 256"), "{error}");
}

#[test]
fn missing_malformed_and_foreign_tokenizers_are_rejected() {
    let text = |dir: &Path, vocab_size| {
        let error = Tokenizer::open(dir, vocab_size).unwrap_err().to_string();
        error.replace(&dir.display().to_string(), "DIR")
    };
    assert_eq!(text(Path::new("/no/such"), 1), "model.tokenizer: DIR: there is no such folder");
    assert_eq!(text(folder(&[]).path(), 1), "model.tokenizer: DIR: there is no tokenizer.json");
    let damaged = text(folder(&[("tokenizer.json", "{}")]).path(), 1);
    assert!(damaged.starts_with("model.tokenizer: DIR/tokenizer.json is not a tokenizer: "), "{damaged}");
    assert_eq!(
        text(&fixture("qwen3"), 287),
        "model.tokenizer: DIR: tokenizer.json gives \"<|im_end|>\" the id 287, the model's vocab_size is 287; the \
         tokenizer belongs to another model"
    );
    let whole = std::fs::read_to_string(fixture("qwen3").join("tokenizer.json")).unwrap();
    // A template with a second sequence for single texts, on which the crate panics at encode.
    let mut file: Value = serde_json::from_str(&whole).unwrap();
    file["post_processor"] = json!({ "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{ "Sequence": { "id": "B", "type_id": 0 } }] });
    assert_eq!(
        text(folder(&[("tokenizer.json", &file.to_string())]).path(), 288),
        "model.tokenizer: DIR/tokenizer.json is not a tokenizer: a part of it is malformed"
    );
    for (decoder, reason) in [
        (json!({ "type": "Strip", "content": "t", "start": 0, "stop": 9 }), "a part of it is malformed"),
        (json!({ "type": "Strip", "content": "t", "start": 9, "stop": 9 }), "a part of it is malformed"),
        (
            json!({ "type": "Sequence", "decoders": vec![json!({ "type": "Replace",
                "pattern": { "String": "t" }, "content": "tt" }); 20] }),
            "decoder multiplies its input by up to 1048576, expected at most 1024",
        ),
        (
            json!({ "type": "Sequence", "decoders": vec![json!({ "type": "Fuse" }); 100] }),
            "decoder has 101 steps, expected at most 24",
        ),
    ] {
        file["post_processor"] = Value::Null;
        file["decoder"] = decoder;
        assert_eq!(
            text(folder(&[("tokenizer.json", &file.to_string())]).path(), 288),
            format!("model.tokenizer: DIR/tokenizer.json is not a tokenizer: {reason}")
        );
    }
    let end = r#"{"eos_token": {"content": "<end>"}}"#;
    let unknown = text(folder(&[("tokenizer.json", &whole), ("tokenizer_config.json", end)]).path(), 288);
    assert_eq!(
        unknown,
        "model.tokenizer: tokenizer_config.json: eos_token = \"<end>\" is not in tokenizer.json"
    );
    let end = r#"{"eos_token": 5}"#;
    let number = text(folder(&[("tokenizer.json", &whole), ("tokenizer_config.json", end)]).path(), 288);
    assert_eq!(number, "model.tokenizer: tokenizer_config.json: eos_token = 5, expected a token");

    let outside = "model.tokenizer: token id 288 is not below vocab_size = 288";
    assert_eq!(open("qwen3").decode(&[1, 288]).unwrap_err().to_string(), outside);
    assert_eq!(open("qwen3").decoder().push(288).unwrap_err().to_string(), outside);
    let begins = std::fs::read_to_string(fixture("llama").join("tokenizer.json")).unwrap();
    let begins = begins.replace("\"ids\":[283]", "\"ids\":[288]");
    let begins = Tokenizer::open(folder(&[("tokenizer.json", &begins)]).path(), 288).unwrap();
    assert_eq!(begins.encode("a", true).unwrap_err().to_string(), outside);
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let whole = std::fs::read_to_string(fixture("qwen3").join("tokenizer.json")).unwrap();
    let mut file: Value = serde_json::from_str(&whole).unwrap();
    file["truncation"] =
        json!({ "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0 });
    file["padding"] = json!({ "strategy": { "Fixed": 64 }, "direction": "Left", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!" });
    let dir = folder(&[("tokenizer.json", &file.to_string())]);
    let tokenizer = Tokenizer::open(dir.path(), 288).unwrap();
    let text = "the pages of the wright";
    assert_eq!(tokenizer.encode(text, true).unwrap(), open("qwen3").encode(text, true).unwrap());
    assert_eq!(tokenizer.eos_id(), None);
}

#[test]
fn corrupted_files_never_panic() {
    let whole = std::fs::read(fixture("llama").join("tokenizer.json")).unwrap();
    let dir = folder(&[]);
    let mut generator = Generator::new(11);
    for _ in 0..500 {
        let mut damaged = whole.clone();
        for _ in 0..1 + generator.below(3) {
            let at = generator.below(damaged.len());
            damaged[at] = generator.pick(b"\"{}[]:,0129ax\\");
        }
        std::fs::write(dir.path().join("tokenizer.json"), damaged).unwrap();
        if let Ok(tokenizer) = Tokenizer::open(dir.path(), 288) {
            let ids = tokenizer.encode("the pages, naïve 🧱<|eot_id|>", true).unwrap_or_default();
            let _ = tokenizer.decode(&ids);
        }
    }
}

#[test]
fn prompts_equal_those_of_transformers() {
    for name in FIXTURES {
        let template = ChatTemplate::open(&fixture(name)).unwrap().unwrap();
        let file = if name == "qwen3" { "chat_template.jinja" } else { "tokenizer_config.json" };
        for case in expected(name)["chat"].as_array().unwrap() {
            let prompt = template.render(&messages(case), case["add_generation_prompt"].as_bool().unwrap());
            match case["error"].as_str() {
                None => assert_eq!(prompt.unwrap(), case["text"].as_str().unwrap(), "{name}"),
                Some(error) => {
                    let error = format!("model.chat: the template of {file} fails: line 16: {error}");
                    assert_eq!(prompt.unwrap_err().to_string(), error);
                }
            }
        }
    }
}

#[test]
fn the_file_overrides_the_field_and_tokens_may_be_objects() {
    let config = r#"{"bos_token": {"content": "<s>"}, "chat_template": "field"}"#;
    let dir = folder(&[
        ("tokenizer_config.json", config),
        ("chat_template.jinja", "{{ bos_token }}file{{ eos_token }}"),
    ]);
    let template = ChatTemplate::open(dir.path()).unwrap().unwrap();
    assert_eq!(template.render(&[], false).unwrap(), "<s>file");
    assert!(ChatTemplate::open(folder(&[]).path()).unwrap().is_none());
}

fn render(template: &str) -> Result<String, String> {
    let dir = folder(&[("chat_template.jinja", template)]);
    let template = ChatTemplate::open(dir.path()).map_err(|error| error.to_string())?.unwrap();
    template.render(&[Message::new("user", "hi")], true).map_err(|error| error.to_string())
}

#[test]
fn constructs_of_published_templates_are_supported() {
    for (template, expected) in [
        (
            "{{ messages | tojson(indent=2) }}",
            "[\n  {\n    \"role\": \"user\",\n    \"content\": \"hi\"\n  }\n]",
        ),
        ("{{ strftime_now('%%') if strftime_now is defined }}", "%"),
        ("{% generation %}a{% endgeneration %}{%- generation -%} b {%- endgeneration -%} c", "abc"),
        ("{{ {'a': [], 'b': none}.items() | length }}{{ tools is none }}{{ unknown }}", "2True"),
        ("{% set a = 'b\\\nc' %}{{ a }}{{ 'd\\\ne' }}f\\\ng{{ 'h\\\\\ni' }}", "bcdef\\\ngh\\\ni"),
        ("{{ 'generation' }}{% set generation = 1 %}{{ generation }}", "generation1"),
    ] {
        assert_eq!(render(template).as_deref(), Ok(expected), "{template}");
    }
}

#[test]
fn template_errors_have_a_line_and_a_reason() {
    for (template, expected) in [
        ("{% if %}", "the template of chat_template.jinja does not parse: line 1: unexpected end of block"),
        (
            "\n{{ raise_exception('no tools') }}",
            "the template of chat_template.jinja fails: line 2: no tools",
        ),
        ("{{ a.b }}", "the template of chat_template.jinja fails: line 1: undefined value"),
        (
            "{{ strftime_now('%Q') }}",
            "the template of chat_template.jinja fails: line 1: strftime_now does not know the code %Q",
        ),
        (
            "{{ 1 | tojson(default=2) }}",
            "the template of chat_template.jinja fails: line 1: unknown keyword argument 'default'",
        ),
    ] {
        assert_eq!(render(template), Err(format!("model.chat: {expected}")));
    }
    let text = |config: &str| {
        let dir = folder(&[("tokenizer_config.json", config)]);
        ChatTemplate::open(dir.path()).unwrap_err().to_string()
    };
    assert_eq!(
        text(r#"{"chat_template": [{"name": "rag", "template": ""}]}"#),
        "model.chat: tokenizer_config.json: none of the chat templates [\"rag\"] is named \"default\""
    );
    assert_eq!(
        text(r#"{"chat_template": 3}"#),
        "model.chat: tokenizer_config.json: chat_template is neither text nor list"
    );
    let missing = ChatTemplate::open(Path::new("/no/such")).unwrap_err();
    assert_eq!(missing.to_string(), "model.chat: /no/such: there is no such folder");
}
