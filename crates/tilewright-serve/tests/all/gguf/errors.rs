//! Damaged and unsupported GGUF files: the text of each error, and no panic for any truncation or changed byte.

use super::{GgufFile, Meta, Q4_0, Q4_K, Q8_0, Source, convert::add_tokenizer, fields, open};
use crate::fixtures::{fixture, read_json};
use std::path::Path;
use tilewright_serve::model::{Gguf, Transformer, Weights};

/// A file of the fixture `name`, with its tokenizer.
fn file(name: &str) -> GgufFile {
    let (fields, weights) = (fields(name), Weights::open(&fixture(name)).expect("weights"));
    let mut file = Source { fields: &fields, weights: &weights }.to_gguf();
    add_tokenizer(&mut file, &read_json(&format!("{name}/tokenizer.json")), Some("qwen2"));
    file
}

/// Opens the file with these bytes and loads all of it.
fn load(path: &Path, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(path, bytes).expect("written");
    let load = || {
        let gguf = Gguf::open(path)?;
        let config = gguf.config()?;
        gguf.tokenizer(config.vocab_size)?;
        gguf.chat_template()?;
        Transformer::new(config.clone(), &gguf.weights(&config)?, None).map(drop)
    };
    load().map_err(|error| error.to_string().replace(&path.display().to_string(), "FILE"))
}

#[track_caller]
fn assert_rejected(bytes: &[u8], expected: &str) {
    let dir = tempfile::tempdir().expect("a folder");
    let error = load(&dir.path().join("model.gguf"), bytes).expect_err("a bad file");
    assert_eq!(error, expected);
}

/// The bytes of the `qwen3` file with `bytes` at `at`.
fn patched(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut file = file("qwen3").bytes();
    file[at..at + bytes.len()].copy_from_slice(bytes);
    file
}

#[test]
fn a_whole_file_loads() {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["llama", "qwen2", "qwen3"] {
        assert_eq!(load(&dir.path().join("model.gguf"), &file(name).bytes()), Ok(()), "{name}");
        let mut bytes = file(name).bytes();
        bytes[4] = 2;
        assert_eq!(load(&dir.path().join("model.gguf"), &bytes), Ok(()), "version 2 has the same layout");
    }
}

#[test]
fn other_formats_are_rejected() {
    assert_rejected(b"", "model.gguf: FILE: is truncated: 0 bytes, and the magic needs 4 bytes at 0");
    assert_rejected(&patched(0, b"GGML"), "model.gguf: FILE: begins with \"GGML\", expected \"GGUF\"");
    for version in [0u32, 1, 4] {
        let expected = format!("model.gguf: FILE: version = {version} is not supported, expected 2 or 3");
        assert_rejected(&patched(4, &version.to_le_bytes()), &expected);
    }
    assert_rejected(
        &patched(4, &3u32.to_be_bytes()),
        "model.gguf: FILE: version = 0x03000000 is big-endian, expected a little-endian file",
    );
    let error = Gguf::open(Path::new("no.gguf")).expect_err("no file").to_string();
    assert_eq!(error, "model.gguf: no.gguf: does not exist");
    let error = Gguf::open(Path::new(".")).expect_err("a folder").to_string();
    assert_eq!(error, "model.gguf: .: is a folder, expected a regular file");
}

#[test]
fn huge_counts_are_rejected_before_memory_is_reserved() {
    let size = file("qwen3").bytes().len();
    let huge = u64::MAX.to_le_bytes();
    let expected = |what: &str, at: usize, bytes: usize| {
        let rest = size - at;
        let most = rest / bytes;
        format!("model.gguf: FILE: {what} = {}, expected at most {most}: {rest} bytes remain", u64::MAX)
    };
    assert_rejected(&patched(16, &huge), &expected("metadata_kv_count", 24, 13));
    assert_rejected(&patched(24, &huge), &expected("the length of the name of a metadata entry", 32, 1));
    let most = (size - 24) / 13;
    let expected = format!(
        "model.gguf: FILE: metadata_kv_count = {}, expected at most {most}: {} bytes remain",
        most + 1,
        size - 24
    );
    assert_rejected(&patched(16, &(most as u64 + 1).to_le_bytes()), &expected);
    let header = file("qwen3");
    let count = patched(8, &huge);
    let dir = tempfile::tempdir().expect("a folder");
    let error = load(&dir.path().join("model.gguf"), &count).expect_err("a bad file");
    assert!(
        error.starts_with("model.gguf: FILE: tensor_count = 18446744073709551615, expected at most "),
        "{error}"
    );
    // the first entry is general.architecture; an array of strings with a huge length
    let mut array = header.clone();
    array.metadata.insert(0, ("a".to_owned(), Meta::Texts(vec!["x".to_owned()])));
    let mut bytes = array.bytes();
    let at = 24 + 8 + 1 + 4 + 4;
    bytes[at..at + 8].copy_from_slice(&huge);
    let error = load(&dir.path().join("model.gguf"), &bytes).expect_err("a bad file");
    assert!(
        error.starts_with("model.gguf: FILE: the length of a = 18446744073709551615, expected at most "),
        "{error}"
    );
    let mut values = GgufFile::default();
    values.set("a", Meta::Bools(vec![true; (1 << 22) + 1]));
    assert_rejected(&values.bytes(), "model.gguf: FILE: a: the metadata has more than 4194304 values");
}

#[test]
fn damaged_metadata_is_rejected() {
    let mut twice = file("qwen3");
    twice.metadata.push(("general.architecture".to_owned(), Meta::Text("qwen3".to_owned())));
    assert_rejected(&twice.bytes(), "model.gguf: FILE: metadata general.architecture occurs twice");
    let mut alignment = file("qwen3");
    alignment.set("general.alignment", Meta::U32(24));
    assert_rejected(
        &alignment.bytes(),
        "model.gguf: FILE: general.alignment = 24, expected a power of two up to 1048576",
    );
    let scalar = |kind: u32, value: u8| {
        let mut bytes = b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0k".to_vec();
        bytes.extend(kind.to_le_bytes());
        bytes.resize(bytes.len() + 16, value);
        bytes
    };
    assert_rejected(&scalar(13, 0), "model.gguf: FILE: k has metadata type 13, expected 0 to 12");
    assert_rejected(&scalar(7, 2), "model.gguf: FILE: k = 2, expected a boolean, 0 or 1");
    let nested = "model.gguf: FILE: k is an array of type 151587081, expected numbers, booleans or strings";
    assert_rejected(&scalar(9, 9), nested);
}

#[test]
fn unsupported_tensors_are_rejected() {
    let with = |edit: &dyn Fn(&mut GgufFile)| {
        let mut file = file("qwen3");
        edit(&mut file);
        file.bytes()
    };
    let kind = |kind: u32| with(&|file| file.tensor("blk.1.ffn_up.weight").kind = kind);
    let expected = |name: &str| {
        format!(
            "model.gguf: FILE: tensor blk.1.ffn_up.weight is {name}, expected F32, F16, BF16, Q8_0, Q4_0, Q4_K or Q6_K"
        )
    };
    assert_rejected(&kind(13), &expected("Q5_K (type 13)"));
    assert_rejected(&kind(20), &expected("IQ4_NL (type 20)"));
    assert_rejected(&kind(99), &expected("type 99"));
    let divisible = |kind: u32, columns: usize| {
        with(&|file| {
            let tensor = file.tensor("blk.1.ffn_up.weight");
            (tensor.kind, tensor.shape) = (kind, vec![64, columns]);
        })
    };
    for (kind, name, columns, group) in
        [(Q8_0, "Q8_0", 48, 32), (Q4_0, "Q4_0", 31, 32), (Q4_K, "Q4_K", 64, 256)]
    {
        let expected = format!(
            "model.gguf: FILE: tensor blk.1.ffn_up.weight is {name} with rows of {columns}, expected a multiple of {group}"
        );
        assert_rejected(&divisible(kind, columns), &expected);
    }
    assert_rejected(
        &with(&|file| file.tensor("blk.1.ffn_up.weight").shape = vec![1; 5]),
        "model.gguf: FILE: tensor blk.1.ffn_up.weight has 5 axes, expected at most 4",
    );
    assert_rejected(
        &with(&|file| file.tensor("blk.1.ffn_up.weight").shape = vec![1 << 40, 1 << 40]),
        "model.gguf: FILE: tensor blk.1.ffn_up.weight has shape [1099511627776, 1099511627776], more elements than 64 bits count",
    );
    assert_rejected(
        &with(&|file| file.tensors.push(file.tensors[3].clone())),
        "model.gguf: FILE: tensor blk.0.attn_k.weight occurs twice",
    );
    assert_rejected(
        &with(&|file| file.tensor("output.weight").name = "blk.0.ssm_in.weight".to_owned()),
        "model.weights: blk.0.ssm_in.weight has no place in a model of this config.json",
    );
    assert_rejected(
        &with(&|file| file.tensors.retain(|tensor| tensor.name != "blk.2.attn_q.weight")),
        "model.weights: FILE: there is no tensor model.layers.2.self_attn.q_proj.weight",
    );
    assert_rejected(
        &with(&|file| file.tensors.retain(|tensor| tensor.name != "token_embd.weight")),
        "model.config: FILE: tensor token_embd.weight is missing, expected [vocab_size, hidden_size]",
    );
}

#[test]
fn tensors_outside_the_file_or_off_alignment_are_rejected() {
    let whole = file("qwen3").bytes();
    let last = file("qwen3").tensors.last().expect("a tensor").clone();
    let size = whole.len();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.gguf");
    let error = load(&path, &whole[..size - 32]).expect_err("a truncated file");
    let start = format!("model.gguf: FILE: is truncated: {} bytes, and tensor {} has ", size - 32, last.name);
    assert!(error.starts_with(&start), "{error}");
    // the offset is the last field of the header
    let named = [&(last.name.len() as u64).to_le_bytes(), last.name.as_bytes()].concat();
    let name = whole.windows(named.len()).position(|bytes| bytes == named).expect("the tensor");
    let at = name + named.len() + 4 + 8 * last.shape.len() + 4;
    let stored = u64::from_le_bytes(whole[at..at + 8].try_into().expect("eight bytes"));
    let expected = format!(
        "model.gguf: FILE: tensor {} has offset {}, expected a multiple of 32",
        last.name,
        stored + 4
    );
    assert_rejected(&patched(at, &(stored + 4).to_le_bytes()), &expected);
    let error = load(&path, &patched(at, &(u64::MAX - 31).to_le_bytes())).expect_err("an overflowing offset");
    assert!(error.contains("is truncated: ") && error.contains("at offset 18446744073709551584"), "{error}");
}

#[test]
fn unsupported_configurations_are_rejected() {
    let with = |name: &str, key: &str, value: Option<Meta>| {
        let mut file = file(name);
        file.remove(key);
        value.into_iter().for_each(|value| file.set(key, value));
        file.bytes()
    };
    assert_rejected(
        &with("qwen3", "general.architecture", Some(Meta::Text("phi3".to_owned()))),
        "model.gguf: FILE: general.architecture = \"phi3\" is not supported, expected one of llama, qwen2, qwen3, gemma2, gemma3, \
         granite, olmo2, smollm3",
    );
    assert_rejected(
        &with("qwen3", "general.architecture", None),
        "model.gguf: FILE: general.architecture is missing",
    );
    let cases = [
        ("qwen3.block_count", None, "qwen3.block_count is missing"),
        ("qwen3.expert_count", Some(Meta::U32(8)), "qwen3.expert_count = 8 is not supported"),
        ("qwen3.some_scale", Some(Meta::F32(0.5)), "qwen3.some_scale = 0.5 is not supported"),
        ("qwen3.some_list", Some(Meta::I32s(vec![1, 2])), "qwen3.some_list = a list of 2 is not supported"),
        (
            "qwen3.rope.scaling.type",
            Some(Meta::Text("longrope".to_owned())),
            "qwen3.rope.scaling.type = \"longrope\" is not supported, expected none, linear or yarn",
        ),
        (
            "qwen3.rope.dimension_count",
            Some(Meta::U32(16)),
            "qwen3.rope.dimension_count = 16, expected the head size 32",
        ),
        (
            "qwen3.attention.value_length",
            Some(Meta::U32(16)),
            "qwen3.attention.value_length = 16, expected qwen3.attention.key_length = 32",
        ),
        (
            "tokenizer.ggml.eos_token_id",
            Some(Meta::U32(288)),
            "tokenizer.ggml.eos_token_id = 288, expected token ids below vocab_size = 288",
        ),
        (
            "qwen3.attention.head_count",
            Some(Meta::U32(3)),
            "num_attention_heads = 3 is not a multiple of num_key_value_heads = 2",
        ),
    ];
    for (key, value, expected) in cases {
        assert_rejected(&with("qwen3", key, value), &format!("model.config: FILE: {expected}"));
    }
    assert_rejected(
        &with("llama", "llama.rope.scaling.type", Some(Meta::Text("yarn".to_owned()))),
        "model.config: FILE: llama.rope.scaling.type = \"yarn\" is not supported beside rope_freqs.weight",
    );
    // off: a count of 0
    let mut off = file("qwen3");
    off.set("qwen3.expert_count", Meta::U32(0));
    open(&off).1.config().expect("a configuration");
}

#[test]
fn heads_that_do_not_divide_the_rows_are_rejected() {
    let mut file = file("llama");
    file.set("llama.attention.head_count", Meta::U32(6));
    file.set("llama.attention.key_length", Meta::U32(16));
    assert_rejected(
        &file.bytes(),
        "model.gguf: FILE: tensor blk.0.attn_q.weight has 64 rows, expected a multiple of 12: 6 heads of an even size",
    );
}

/// Every truncation of a file, and every byte of its header changed, gives a model or an error.
#[test]
fn no_damage_panics() {
    let mut small = file("llama");
    small.tensors.truncate(14);
    small.set("llama.block_count", Meta::U32(1));
    let bytes = small.bytes();
    let data: usize = small.tensors.iter().map(|tensor| tensor.bytes.len().next_multiple_of(32)).sum();
    let header = bytes.len() - data;
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.gguf");
    let mut rejected = 0;
    for len in (0..header).step_by(3).chain([bytes.len() - 1]) {
        rejected += usize::from(load(&path, &bytes[..len]).is_err());
    }
    assert_eq!(rejected, header.div_ceil(3) + 1, "a truncated file is never accepted");
    for (at, mask) in (0..header).step_by(5).zip([1, 0x80, 0xff].into_iter().cycle()) {
        let mut damaged = bytes.clone();
        damaged[at] ^= mask;
        // a changed letter of a name may be harmless
        let _ = load(&path, &damaged);
    }
}
