//! GGUF files as `--model` of `generate` and `bench`: the text of the folder with the same weights, integer matrices, errors.

#[path = "../../../crates/tilewright-serve/tests/all/gguf/convert.rs"]
mod convert;
#[path = "../../../crates/tilewright-serve/tests/all/gguf/writer.rs"]
mod writer;

use super::program::generate;
use crate::{
    fixtures::{fixture, read_json},
    output::{text, tilewright},
};
use std::path::PathBuf;
use tempfile::TempDir;
use tilewright_serve::model::Weights;
use writer::{F32, GgufFile, Q8_0};

const PROMPT: &str = "the pages of";

/// The `qwen3` fixture as a file, with its tokenizer.
fn qwen3() -> GgufFile {
    let dir = fixture("qwen3");
    let fields = read_json("qwen3/config.json");
    let weights = Weights::open(&dir).expect("weights");
    let source = convert::Source { fields: fields.as_object().expect("an object"), weights: &weights };
    let mut file = source.to_gguf();
    convert::add_tokenizer(&mut file, &read_json("qwen3/tokenizer.json"), Some("qwen2"));
    file.set("tokenizer.chat_template", writer::Meta::Text("{{ messages[0].content }}:".to_owned()));
    file
}

fn write(file: &GgufFile) -> (TempDir, String) {
    let dir = tempfile::tempdir().expect("a folder");
    let path: PathBuf = dir.path().join("model.gguf");
    file.write(&path);
    let name = path.display().to_string();
    (dir, name)
}

/// The fixture with matrices in Q8_0.
fn quantized() -> GgufFile {
    let mut file = qwen3();
    for tensor in file.tensors.iter_mut().filter(|tensor| tensor.kind == F32 && tensor.shape.len() == 2) {
        let (values, _) = tensor.bytes.as_chunks();
        let values: Vec<f32> = values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        (tensor.kind, tensor.bytes) = (Q8_0, writer::quantize(Q8_0, &values));
    }
    file
}

#[test]
fn a_file_continues_as_the_folder_with_the_same_weights() {
    let (_dir, path) = write(&qwen3());
    let folder = fixture("qwen3").display().to_string();
    let text = |model: &str, more: &[&str]| {
        let common = ["-q", "--temperature", "0", "--max-tokens", "30", "--model", model, PROMPT];
        generate(&[more, &common].concat()).text().to_owned()
    };
    assert_eq!(text(&path, &[]), text(&folder, &[]));
    assert_eq!(text(&path, &["--dtype", "bf16"]), text(&folder, &["--dtype", "bf16"]));
    assert!(!text(&path, &["--chat"]).starts_with(PROMPT), "the answer alone");
}

#[test]
fn quantized_files_run_in_both_commands_and_are_not_quantized_again() {
    let (_dir, path) = write(&quantized());
    let run = generate(&["--temperature", "0", "--max-tokens", "5", "--model", &path, PROMPT]);
    assert!(run.text().starts_with(PROMPT), "{run:?}");
    let run = generate(&["--weights", "int8", "--model", &path, PROMPT]);
    let expected =
        "× model.quantize: format = Int8, but lm_head.weight is stored as Q8_0, expected f32, f16 or bf16";
    assert_eq!((run.code, run.error_line().as_str()), (1, expected));
    let bench = |more: &[&str]| {
        let quick = ["--steps", "2", "--repeats", "1", "--batch", "1", "--context", "5", "--prefill", "20"];
        let mut command = tilewright(&["bench", "--model", &path]);
        let output = command.args(quick).args(more).output().expect("the program starts");
        (output.status.success(), text(&[output.stdout, output.stderr].concat()).to_owned())
    };
    let (succeeded, report) = bench(&[]);
    assert!(succeeded && report.contains("as stored") && report.contains("gemm.packed_linear"), "{report}");
    let (succeeded, report) = bench(&["--weights", "int4"]);
    assert!(!succeeded && report.contains("lm_head.weight is stored as Q8_0"), "{report}");
}

#[test]
fn files_that_are_no_models_are_named() {
    let run = generate(&["--model", "Cargo.toml", PROMPT]);
    let expected = "× model.gguf: Cargo.toml: begins with \"[wor\", expected \"GGUF\"";
    assert_eq!((run.code, run.error_line().as_str()), (1, expected));
    let run = generate(&["--model", "nowhere.gguf", PROMPT]);
    assert_eq!((run.code, run.error_line().as_str()), (1, "× model.gguf: nowhere.gguf: does not exist"));
}
