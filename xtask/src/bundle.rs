//! `cargo xtask bundle`: a folder with the GPU's tests and benches, for a machine that has a GPU but neither cargo nor a network.
//!
//! `run.sh` in the folder runs them there, the tests under the sanitizers too if they are installed, and leaves what they say
//! in the folder that it is given.

use serde_json::Value;
use std::{fs, path::Path, process::Command};

/// The most that the folder may weigh.
const LIMIT: u64 = 60 << 20;

const SCRIPT: &str = r#"#!/usr/bin/env bash
# Runs the tests and benches of this folder. Usage: run.sh OUT [PYTHON WITH TORCH]
set -uo pipefail
cd "$(dirname "$0")"
out=${1:?"usage: run.sh OUT [PYTHON]"}
peer=${2:+--peer $2}
mkdir -p "$out"
failed=0
for test in test_*; do
    echo "== $test"
    "./$test" --nocapture >"$out/$test.txt" 2>&1 || failed=1
    tail -n 3 "$out/$test.txt"
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck synccheck; do
            compute-sanitizer --error-exitcode 9 --tool "$tool" "./$test" >"$out/$test.$tool.txt" 2>&1 || failed=1
            echo "$tool: $(tail -n 1 "$out/$test.$tool.txt")"
        done
    fi
done
for bench in bench_*; do
    echo "== $bench"
    # shellcheck disable=SC2086
    "./$bench" --record "$out/$bench.csv" $peer 2>&1 | tee "$out/$bench.txt"
done
exit $failed
"#;

/// Builds the folder `target/bundle`.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let folder = root.join("target/bundle");
    let said = |what: &str, why: std::io::Error| format!("{what}: {why}");
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(|why| said("emptying target/bundle", why))?;
    }
    fs::create_dir_all(&folder).map_err(|why| said("making target/bundle", why))?;
    let mut bytes = 0;
    for (name, executable) in executables(root)? {
        let to = folder.join(&name);
        fs::copy(&executable, &to).map_err(|why| said(&format!("copying {executable}"), why))?;
        // line tables are for whoever debugs here
        let stripped = Command::new("strip").arg(&to).status();
        if !stripped.is_ok_and(|status| status.success()) {
            println!("{name} keeps its debug information: `strip` did not work");
        }
        let size = fs::metadata(&to).map_err(|why| said(&name, why))?.len();
        println!("{name:24} {:6.1} MiB", size as f64 / f64::from(1 << 20));
        bytes += size;
    }
    let script = folder.join("run.sh");
    fs::write(&script, SCRIPT).map_err(|why| said("run.sh", why))?;
    if bytes > LIMIT {
        return Err(format!("target/bundle has {bytes} bytes, expected at most {LIMIT}"));
    }
    println!(
        "target/bundle: copy it to a machine with a GPU, and run `bash run.sh OUT [PYTHON WITH TORCH]` there"
    );
    Ok(())
}

/// The tests and benches of the device's crate, built for release: what they are called here, and where cargo put them.
fn executables(root: &Path) -> Result<Vec<(String, String)>, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--release", "--package", "tilewright-cuda", "--tests", "--benches"])
        .args(["--message-format", "json-render-diagnostics"])
        .current_dir(root)
        .stderr(std::process::Stdio::inherit())
        .output()
        .map_err(|why| format!("cargo does not start: {why}"))?;
    if !output.status.success() {
        return Err(format!("cargo ended with {}", output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(messages.filter_map(|message| executable(&message)).collect())
}

/// The name and path of a test or bench that a message of cargo tells of.
fn executable(message: &Value) -> Option<(String, String)> {
    let path = message["executable"].as_str()?;
    let (kind, name) = (message["target"]["kind"][0].as_str()?, message["target"]["name"].as_str()?);
    matches!(kind, "test" | "bench").then(|| (format!("{kind}_{name}"), path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::executable;
    use serde_json::json;

    #[test]
    fn tests_and_benches_are_taken_and_nothing_else() {
        let of = |kind: &str| json!({"executable": "/t/a-1", "target": {"kind": [kind], "name": "a"}});
        assert_eq!(executable(&of("test")), Some(("test_a".to_owned(), "/t/a-1".to_owned())));
        assert_eq!(executable(&of("bench")), Some(("bench_a".to_owned(), "/t/a-1".to_owned())));
        assert_eq!(executable(&of("lib")), None);
        assert_eq!(executable(&json!({"executable": null, "target": {"kind": ["test"], "name": "a"}})), None);
    }
}
