//! Calls of cargo and other programs.

use serde_json::Value;
use std::{
    ffi::OsStr,
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

/// Runs a command with its output; an error if it fails.
pub(crate) fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let words: Vec<_> = command.get_args().map(OsStr::to_string_lossy).take(4).collect();
    let spelled = format!("{name} {}", words.join(" "));
    let status = command.status().map_err(|why| format!("`{spelled}` does not start: {why}"))?;
    if status.success() { Ok(()) } else { Err(format!("`{spelled}` ended with {status}")) }
}

#[cfg(test)]
mod tests {
    use super::run;
    use std::process::Command;

    #[test]
    fn a_failed_command_is_named() {
        let why = run(Command::new("no/such/python").arg("-m")).unwrap_err();
        assert!(why.starts_with("`no/such/python -m` does not start"), "{why}");
        let why = run(Command::new("cargo").arg("no-such-command")).unwrap_err();
        assert_eq!(why, "`cargo no-such-command` ended with exit status: 101");
    }
}
