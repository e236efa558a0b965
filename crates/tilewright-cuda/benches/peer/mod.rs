//! Whoever we are timed beside, a Python script in a process of its own, asked line by line in JSON.

use serde::Deserialize;
use std::{
    error::Error,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// A script that runs, and answers.
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
    /// Runs `script`, which the binary carries along.
    pub(crate) fn start(python: &str, script: &str) -> Result<Self, Box<dyn Error>> {
        let mut process =
            Command::new(python).args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = process.stdin.take().ok_or("the peer has no stdin")?;
        let from = BufReader::new(process.stdout.take().ok_or("the peer has no stdout")?);
        Ok(Self { process, to, from })
    }

    fn ask(&mut self, line: &str) -> Result<Answer, Box<dyn Error>> {
        writeln!(self.to, "{line}")?;
        loop {
            let mut answer = String::new();
            if self.from.read_line(&mut answer)? == 0 {
                return Err(format!("the peer was asked {line} and ended").into());
            }
            // libraries print, too
            let Ok(answer) = serde_json::from_str::<Answer>(&answer) else { continue };
            return match answer.error {
                Some(why) => Err(format!("the peer was asked {line} and said {why}").into()),
                None => Ok(answer),
            };
        }
    }

    /// What it is.
    pub(crate) fn about(&mut self) -> Result<String, Box<dyn Error>> {
        Ok(self.ask("{\"about\": true}")?.about.unwrap_or_default())
    }

    /// Seconds of a call, and which of the peer's ways it was, where it has several.
    pub(crate) fn seconds(&mut self, asked: &str) -> Result<(f64, String), Box<dyn Error>> {
        let answer = self.ask(asked)?;
        Ok((answer.seconds.ok_or("the peer gave no time")?, answer.best.unwrap_or_default()))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // it ends with its stdin; if not, nobody waits for it
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
