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

/// Standard output of a call of cargo, whose errors are shown.
pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|why| format!("cargo does not start: {why}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("cargo ended with {}", output.status)),
    }
}

/// Builds with `subcommand`; returns the JSON messages, of which those with an `executable` name programs.
pub(crate) fn build(root: &Path, subcommand: &[&str], targets: &[&str]) -> Result<Vec<Value>, String> {
    let mut command = cargo();
    command.args(subcommand).args(["--message-format", "json-render-diagnostics", "--package"]).args(targets);
    let text = output(command.current_dir(root))?;
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}
