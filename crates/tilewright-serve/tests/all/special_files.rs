//! Model folders whose files are FIFOs, devices, folders or endless: each is refused by kind or size, without blocking.

use crate::fixtures::copy;
use std::{
    os::unix::{fs::symlink, net::UnixListener},
    path::Path,
    process::Command,
};
use tempfile::TempDir;
use tilewright_serve::model::{ChatTemplate, ModelConfig, Tokenizer, Weights};

const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
];

/// A copy of a fixture, with all files.
fn with_all_files() -> TempDir {
    let dir = copy("llama");
    std::fs::write(dir.path().join("chat_template.jinja"), "x").unwrap();
    dir
}

/// The error of the reader of `file`.
fn error(dir: &Path, file: &str) -> String {
    let error = match file {
        "config.json" | "generation_config.json" => ModelConfig::open(dir).map(drop),
        "tokenizer.json" | "tokenizer_config.json" => Tokenizer::open(dir, 288).map(drop),
        "chat_template.jinja" => ChatTemplate::open(dir).map(drop),
        _ => Weights::open(dir).map(drop),
    };
    let error = error.unwrap_err();
    error.message().replace(&dir.display().to_string(), "DIR")
}

#[test]
fn special_files_are_refused_by_kind() {
    for file in FILES {
        let dir = with_all_files();
        let path = dir.path().join(file);
        let kinds: [(&str, &dyn Fn()); 4] = [
            ("a FIFO", &|| assert!(Command::new("mkfifo").arg(&path).status().unwrap().success())),
            ("a device", &|| symlink("/dev/zero", &path).unwrap()),
            ("a folder", &|| std::fs::create_dir(&path).unwrap()),
            ("a socket", &|| drop(UnixListener::bind(&path).unwrap())),
        ];
        for (kind, make) in kinds {
            if path.is_dir() {
                std::fs::remove_dir(&path).unwrap();
            } else {
                std::fs::remove_file(&path).unwrap();
            }
            make();
            assert_eq!(error(dir.path(), file), format!("DIR/{file}: is {kind}, expected a regular file"));
        }
    }
}

#[test]
fn endless_files_are_refused_by_size() {
    for file in &FILES[..5] {
        let dir = with_all_files();
        // Sparse: it takes no space on the disk.
        let large = std::fs::File::create(dir.path().join(file)).unwrap();
        large.set_len(1 << 40).unwrap();
        assert_eq!(
            error(dir.path(), file),
            format!("DIR/{file}: is longer than 128 MiB, which no such file needs")
        );
    }
}
