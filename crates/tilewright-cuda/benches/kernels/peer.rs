//! Torch in a process of its own, asked line by line.

use std::{
    error::Error,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// The script, which the binary carries along.
const SCRIPT: &str = include_str!("peer.py");

pub(crate) struct Peer {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    pub(crate) fn start(python: &str) -> Result<Self, Box<dyn Error>> {
        let mut process =
            Command::new(python).args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let to = process.stdin.take().ok_or("the peer has no stdin")?;
        let from = BufReader::new(process.stdout.take().ok_or("the peer has no stdout")?);
        Ok(Self { process, to, from })
    }

    fn ask(&mut self, line: &str) -> Result<String, Box<dyn Error>> {
        writeln!(self.to, "{line}")?;
        let mut answer = String::new();
        self.from.read_line(&mut answer)?;
        if answer.contains("\"error\"") || answer.is_empty() {
            return Err(format!("the peer was asked {line} and said {answer:?}").into());
        }
        Ok(answer)
    }

    /// What it is.
    pub(crate) fn about(&mut self) -> Result<String, Box<dyn Error>> {
        let answer = self.ask("{\"about\": true}")?;
        Ok(answer.split('"').nth(3).unwrap_or_default().to_owned())
    }

    /// Seconds of a call.
    pub(crate) fn seconds(&mut self, asked: &str) -> Result<f64, Box<dyn Error>> {
        let answer = self.ask(asked)?;
        let number = answer.split(':').nth(1).unwrap_or_default().trim().trim_end_matches('}');
        Ok(number.parse()?)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // it ends with its stdin; if not, nobody waits for it
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
