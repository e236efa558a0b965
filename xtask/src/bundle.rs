//! `cargo xtask bundle`: a folder with the command line and the GPU tests and benches, for a machine with a GPU but without
//! cargo and network.
//!
//! `run.sh` in the folder unpacks and runs them, some tests also under the sanitizers if installed, and writes their output to a
//! folder.

use crate::cargo;
use serde_json::Value;
use std::{fs, path::Path, process::Command};

/// The maximum size of the folder in bytes.
const LIMIT: u64 = 60 << 20;

const SCRIPT: &str = include_str!("../bundle.sh");

/// Tests to run under the sanitizers: a test target and a filter. One small test per kind of kernel, because some take a minute
/// under a tool.
const SANITIZED: [&str; 20] = [
    // attention with split KV and split Q, merges, packed masks, cascade levels
    "all conformance::lengths::gpu::items_of_several_kv_tiles",
    "all conformance::masks::gpu::tree_drafts_attend_to_their_ancestors",
    "all conformance::cascade::gpu::pages_under_a_packed_mask_are_not_shared",
    // MLA
    "all conformance::parts::gpu::absorbed_decode_agrees_with_the_oracle",
    // scalar kernel with all hooks
    "all conformance::variants::gpu::every_hook_is_called",
    "all conformance::merge::gpu::the_empty_state_is_the_identity_bit_for_bit",
    // append with given and with computed scales
    "all conformance::quantise::gpu::given_scales_divide_and_round",
    "all conformance::quantise::gpu::reused_pages_reset_their_scales",
    "all conformance::layers::norm::gpu::nan_stays_in_its_row_and_empty_batches_are_fine",
    "all conformance::layers::rope::gpu::queries_and_keys_may_differ",
    "all conformance::layers::activation::gpu::nan_and_infinity_follow_the_formulas",
    "all sampling::top::gpu::top_k_selects_what_sorting_selects",
    "all sampling::top::gpu::raw_logprobs_match_the_softmax",
    "all sampling::filters::gpu::tokens_are_batch_invariant",
    "all sampling::speculative::gpu::shorter_drafts_end_with_minus_1_and_the_rest_is_not_read",
    "all sampling::edits::gpu::bias_adds_and_excludes",
    // segment GEMM, bit packing, pipelines
    "all device_operators::gpu::segments_of_rows",
    "all device_operators::gpu::flags_on_the_device",
    "all plan_on_device::gpu::plans_of_device_and_host_compute_equal_results",
    "all gemm::products_of_odd_shapes_agree_with_the_definition",
];

/// Builds `target/bundle`.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let folder = root.join("target/bundle");
    let failed = |what: &str, why: std::io::Error| format!("{what}: {why}");
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(|why| failed("emptying target/bundle", why))?;
    }
    fs::create_dir_all(&folder).map_err(|why| failed("making target/bundle", why))?;
    let programs = folder.join("programs");
    fs::create_dir(&programs).map_err(|why| failed("making target/bundle/programs", why))?;
    for (name, executable) in executables(root)? {
        let to = programs.join(&name);
        fs::copy(&executable, &to).map_err(|why| failed(&format!("copying {executable}"), why))?;
        // line tables are not needed there
        let stripped = Command::new("strip").arg(&to).status();
        if !stripped.is_ok_and(|status| status.success()) {
            println!("{name} keeps its debug information: `strip` did not work");
        }
        let size = fs::metadata(&to).map_err(|why| failed(&name, why))?.len();
        println!("{name:24} {:6.1} MiB", size as f64 / f64::from(1 << 20));
    }
    let mut bytes = pack(&programs, &folder.join("programs.tar.gz"))?;
    for what in ["models/tilewright-small", "tests/fixtures"] {
        bytes += copy_folder(&root.join(what), &folder.join(what)).map_err(|why| failed(what, why))?;
    }
    let script = folder.join("run.sh");
    fs::write(&script, SCRIPT.replace("@SANITIZED@", &SANITIZED.join("\n")))
        .map_err(|why| failed("run.sh", why))?;
    if bytes > LIMIT {
        return Err(format!("target/bundle has {bytes} bytes, expected at most {LIMIT}"));
    }
    println!("target/bundle: copy it to a machine with a GPU and run `bash run.sh OUT` there");
    Ok(())
}

/// Packs a folder and deletes it. Returns the size of the archive, about a third, because tests share most of their code.
fn pack(folder: &Path, archive: &Path) -> Result<u64, String> {
    cargo::run(Command::new("tar").arg("-czf").arg(archive).arg("-C").arg(folder).arg("."))?;
    let failed = |why: std::io::Error| format!("{}: {why}", archive.display());
    fs::remove_dir_all(folder).map_err(failed)?;
    Ok(fs::metadata(archive).map_err(failed)?.len())
}

/// Copies a folder. Returns its size in bytes.
fn copy_folder(from: &Path, to: &Path) -> std::io::Result<u64> {
    fs::create_dir_all(to)?;
    let mut bytes = 0;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        bytes += match entry.file_type()?.is_dir() {
            true => copy_folder(&entry.path(), &to)?,
            false => fs::copy(entry.path(), to)?,
        };
    }
    Ok(bytes)
}

/// Builds the command line and the tests and benches of the CUDA crate in release mode. Returns their names in the bundle and
/// their paths.
fn executables(root: &Path) -> Result<Vec<(String, String)>, String> {
    let packages: [&[&str]; 2] =
        [&["tilewright-cuda", "--tests", "--benches"], &["tilewright-cli", "--bin", "tilewright"]];
    let mut found = Vec::new();
    for arguments in packages {
        found.extend(cargo::build(root, &["build", "--release"], arguments)?.iter().filter_map(executable));
    }
    Ok(found)
}

/// The name and path of the executable in a message of cargo.
fn executable(message: &Value) -> Option<(String, String)> {
    let path = message["executable"].as_str()?;
    let (kind, name) = (message["target"]["kind"][0].as_str()?, message["target"]["name"].as_str()?);
    match kind {
        "test" | "bench" => Some((format!("{kind}_{name}"), path.to_owned())),
        "bin" => Some((name.to_owned(), path.to_owned())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{SANITIZED, executable};
    use serde_json::json;
    use std::{fs, path::Path};

    /// A filter that matches no test would run none.
    #[test]
    fn sanitized_tests_exist() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
        let read = |path: &str| fs::read_to_string(crates.join(path)).unwrap_or_default();
        for what in SANITIZED {
            let (target, test) = what.split_once(' ').unwrap_or((what, ""));
            let folder = format!("tilewright-cuda/tests/{target}");
            assert!(!read(&format!("{folder}/main.rs")).is_empty(), "there is no test target {target}");
            let (subject, test) = test.split_once("::").unwrap_or((test, ""));
            let subject = [format!("{folder}/{subject}.rs"), format!("{folder}/{subject}/mod.rs")];
            let code = subject.map(|path| read(&path)).concat();
            assert!(!code.is_empty(), "{what}: no such module");
            let Some((module, test)) = test.split_once("gpu::") else { continue };
            // a module that includes a file of another crate names its path
            let code = match module.strip_suffix("::") {
                Some(module) => {
                    let (first, inner) = module.split_once("::").unwrap_or((module, "mod"));
                    let ends = [format!("/{first}.rs\"]"), format!("/{first}/mod.rs\"]")];
                    let path = |line: &&str| ends.iter().any(|end| line.trim_end().ends_with(end.as_str()));
                    let line = code.lines().find(path).unwrap_or_else(|| panic!("{what}: no such module"));
                    let path = line.split('"').nth(1).and_then(|path| path.strip_prefix("../../../../"));
                    read(&path.unwrap_or_default().replace("mod.rs", &format!("{inner}.rs")))
                }
                None => code,
            };
            assert!(code.contains(&format!("fn {test}<")), "{what}: no such test");
        }
    }

    #[test]
    fn only_programs_tests_and_benches_are_executables() {
        let of = |kind: &str| json!({"executable": "/t/a-1", "target": {"kind": [kind], "name": "a"}});
        assert_eq!(executable(&of("test")), Some(("test_a".to_owned(), "/t/a-1".to_owned())));
        assert_eq!(executable(&of("bench")), Some(("bench_a".to_owned(), "/t/a-1".to_owned())));
        assert_eq!(executable(&of("bin")), Some(("a".to_owned(), "/t/a-1".to_owned())));
        assert_eq!(executable(&of("lib")), None);
        assert_eq!(executable(&json!({"executable": null, "target": {"kind": ["test"], "name": "a"}})), None);
    }
}
