//! A baseline in a Python process of its own, with one JSON request and response per line.

use serde::Deserialize;
use std::{
    error::Error,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// A running peer script.
pub(crate) struct Peer {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

#[derive(Deserialize)]
struct Answer {
    about: Option<String>,
    seconds: Option<f64>,
    best: Option<String>,
    error: Option<String>,
}

impl Peer {
    /// Starts `script`, which is embedded in the binary.
    pub(crate) fn start(python: &str, script: &str) -> Result<Self, Box<dyn Error>> {
        let mut process =
            Command::new(python).args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = process.stdin.take().ok_or("the peer has no stdin")?;
        let from = BufReader::new(process.stdout.take().ok_or("the peer has no stdout")?);
        Ok(Self { process, to, from })
    }

    fn request(&mut self, line: &str) -> Result<Answer, Box<dyn Error>> {
        writeln!(self.to, "{line}")?;
        loop {
            let mut answer = String::new();
            if self.from.read_line(&mut answer)? == 0 {
                return Err(format!("the peer got {line} and ended").into());
            }
            // libraries print to stdout too
            let Ok(answer) = serde_json::from_str::<Answer>(&answer) else { continue };
            return match answer.error {
                Some(why) => Err(format!("the peer got {line} and said {why}").into()),
                None => Ok(answer),
            };
        }
    }

    /// Its versions.
    pub(crate) fn about(&mut self) -> Result<String, Box<dyn Error>> {
        Ok(self.request("{\"about\": true}")?.about.unwrap_or_default())
    }

    /// Seconds per call, and the name of the fastest of the peer's implementations, if it has several.
    pub(crate) fn seconds(&mut self, request: &str) -> Result<(f64, String), Box<dyn Error>> {
        let answer = self.request(request)?;
        Ok((answer.seconds.ok_or("the peer gave no time")?, answer.best.unwrap_or_default()))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // it ends when its stdin closes; kill it in case it does not
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
