//! Calls of cargo.

use serde_json::Value;
use std::{
    path::Path,
    process::{Command, Stdio},
};

/// The cargo that runs this task.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Builds with `subcommand`; returns the JSON messages, of which those with an `executable` name programs.
pub(crate) fn build(root: &Path, subcommand: &[&str], targets: &[&str]) -> Result<Vec<Value>, String> {
    let output = cargo()
        .args(subcommand)
        .args(["--message-format", "json-render-diagnostics", "--package"])
        .args(targets)
        .current_dir(root)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|why| format!("cargo does not start: {why}"))?;
    if !output.status.success() {
        return Err(format!("cargo ended with {}", output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}
