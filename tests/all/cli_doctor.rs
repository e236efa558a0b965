//! `tilewright doctor` and the top-level command line, run as processes.

use crate::output::{printed, root, tilewright};
use std::{
    path::Path,
    process::{Output, Stdio},
};

/// The program in `folder`, without the paths that the environment sets.
fn tilewright_in(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = tilewright(arguments);
    command.current_dir(folder).env_remove("LD_LIBRARY_PATH").env_remove("TILEWRIGHT_CACHE");
    command.env("XDG_CACHE_HOME", folder).output().unwrap()
}

#[test]
fn the_report_has_hardware_and_backend() {
    let output = tilewright_in(root(), &["doctor"]);
    let report = printed(&output);
    let row = |name: &str| {
        let line = report.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{report}"));
        line[name.len()..].trim_start()
    };
    assert_eq!(row("tilewright"), env!("CARGO_PKG_VERSION"));
    let threads = std::thread::available_parallelism().unwrap();
    assert_eq!(row("threads"), threads.to_string());
    assert!(row("backend").starts_with(&format!("cpu: {threads} threads, ")), "{report}");
    let used = row("backend").rsplit(", ").next().unwrap();
    assert!(row("instructions").starts_with("portable"), "{report}");
    assert!(row("instructions").ends_with(&format!("{used} is used")), "{report}");
    assert!(row("roofline").contains(" GB/s read, ") && row("roofline").contains(" GFLOP/s"), "{report}");
    // the GPU, or the reason why none is usable
    let gpu = row("GPU");
    assert!(gpu.ends_with("; the CPU backend will run") || gpu.contains(", sm_"), "{report}");
    assert!(row("kernels").ends_with("tilewright/kernels"), "{report}");
    assert!(row("bundle").starts_with("none; `tilewright kernels bundle` makes "), "{report}");
    assert!(row("checks").starts_with("off (TILEWRIGHT_CHECK=1 "), "{report}");
    assert!(row("model").ends_with("models/tilewright-small"), "{report}");
}

#[test]
fn json_has_the_same_findings() {
    let output = tilewright_in(root(), &["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_str(printed(&output)).unwrap();
    let threads = std::thread::available_parallelism().unwrap().get();
    assert_eq!(report["threads"], threads);
    assert_eq!(report["isa_available"][0], "portable");
    let isas = report["isa_available"].as_array().unwrap();
    assert_eq!(isas.last().unwrap(), &report["isa_used"]);
    assert!(report["roofline"]["gigabytes_per_second"].as_f64().unwrap() > 0.1);
    assert!(report["roofline"]["gigaflops_per_second"].as_f64().unwrap() > 0.1);
    let gpu = &report["gpu"];
    assert_eq!(gpu["backend"], !gpu["device"].is_null());
    assert_eq!(gpu["why"].is_null(), !gpu["device"].is_null(), "exactly one of the two: {gpu}");
    assert!(gpu.get("driver").is_some());
    assert_eq!(report["bundle"]["kernels"], 0);
    assert!(report["bundle"]["why"].as_str().unwrap().ends_with("it is no bundle: there is no such folder"));
    assert_eq!(report["model"]["missing"], serde_json::json!([]));
    #[cfg(target_os = "linux")]
    assert!(report["memory"]["total"].as_u64().unwrap() >= report["memory"]["available"].as_u64().unwrap());
}

#[test]
fn missing_model_files_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("models/tilewright-small");
    std::fs::create_dir_all(&model).unwrap();
    std::fs::write(model.join("config.json"), "{}").unwrap();
    let output = tilewright_in(folder.path(), &["doctor"]);
    let line = "models/tilewright-small is not complete: no tokenizer.json, no model.safetensors\n";
    assert!(printed(&output).ends_with(line), "{}", printed(&output));
}

#[test]
fn the_driver_library_is_found_in_the_loader_path() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libcuda.so.1");
    std::fs::write(&library, "").unwrap();
    let output = tilewright(&["doctor", "--json"]).env("LD_LIBRARY_PATH", folder.path()).output().unwrap();
    let report: serde_json::Value = serde_json::from_str(printed(&output)).unwrap();
    assert_eq!(report["gpu"]["driver"], library.to_str().unwrap());
    assert_eq!(report["gpu"]["backend"], false);
}

#[test]
fn help_lists_the_commands() {
    let output = tilewright_in(root(), &["--help"]);
    for command in ["generate", "plan", "kernels", "doctor"] {
        assert!(printed(&output).lines().any(|line| line.trim().starts_with(command)), "{command}");
    }
    let version = tilewright_in(root(), &["--version"]);
    assert_eq!(printed(&version), format!("tilewright {}\n", env!("CARGO_PKG_VERSION")));
    for arguments in [&[][..], &["no-such-command"], &["doctor", "--no-such-option"]] {
        let output = tilewright_in(root(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_closed_pipe_is_no_error() {
    let mut command = tilewright(&["doctor"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take()); // before the measurement ends
    printed(&child.wait_with_output().unwrap());
}
