//! Baselines in a Python process of its own, with one JSON request and response per line.

use serde::{Deserialize, de::DeserializeOwned};
use std::{
    error::Error,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// A running peer script.
pub(crate) struct PeerProcess {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

#[derive(Deserialize)]
struct Failure {
    error: String,
}

impl PeerProcess {
    /// Starts `script`, which is embedded in the binary.
    pub(crate) fn start(python: &str, script: &str) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(python);
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(|why| format!("--peer {python} does not start: {why}"))?;
        let to = process.stdin.take().ok_or("the peer has no stdin")?;
        let from = BufReader::new(process.stdout.take().ok_or("the peer has no stdout")?);
        Ok(Self { process, to, from })
    }

    /// Sends a request; returns the response.
    pub(crate) fn request<T: DeserializeOwned>(&mut self, line: &str) -> Result<T, Box<dyn Error>> {
        writeln!(self.to, "{line}")?;
        loop {
            let mut answer = String::new();
            if self.from.read_line(&mut answer)? == 0 {
                return Err(format!("the peer got {line} and ended").into());
            }
            if let Ok(Failure { error }) = serde_json::from_str(&answer) {
                return Err(format!("the peer got {line} and said {error}").into());
            }
            // libraries print to stdout too
            if let Ok(answer) = serde_json::from_str(&answer) {
                return Ok(answer);
            }
        }
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        // it ends when its stdin closes; kill it in case it does not
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
