//! The peer: torch in a process of its own (`benches/peers/torch_sdpa.py`), asked for one timed call at a time.

use crate::case::{CacheDtype, Case, Form};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    error::Error,
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/torch_sdpa.py");

/// A running peer; it ends with this value.
pub(crate) struct Peer {
    process: Child,
    /// Taken when the peer is to end, which it does at the end of its input.
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    about: About,
}

/// What runs, as it says itself.
#[derive(Deserialize)]
pub(crate) struct About {
    pub(crate) version: String,
    pub(crate) threads: usize,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Question<'a> {
    Threads { threads: usize },
    Cases { cases: Vec<Shape<'a>> },
    Run { run: &'a str, form: Form },
}

/// What the peer needs to know of a case.
#[derive(Serialize)]
struct Shape<'a> {
    name: &'a str,
    heads: [usize; 2],
    head_dim: usize,
    dtype: CacheDtype,
    requests: usize,
    qo_len: usize,
    kv_len: usize,
}

impl<'a> Shape<'a> {
    fn of(case: &'a Case) -> Self {
        let Case { name, heads, head_dim, dtype, requests, qo_len, kv_len, .. } = case;
        Self {
            name,
            heads: *heads,
            head_dim: *head_dim,
            dtype: *dtype,
            requests: *requests,
            qo_len: *qo_len,
            kv_len: *kv_len,
        }
    }
}

#[derive(Deserialize)]
struct Timed {
    seconds: f64,
}

#[derive(Deserialize)]
struct Done {}

#[derive(Deserialize)]
struct Failed {
    error: String,
}

impl Peer {
    /// Starts it with so many threads.
    pub(crate) fn start(python: &str, threads: usize) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(python);
        command.arg(SCRIPT).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(|why| format!("--peer {python} does not start: {why}"))?;
        let questions = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().ok_or("the peer has no stdout")?);
        let about = About { version: String::new(), threads };
        let mut peer = Self { process, questions, answers, about };
        peer.about = peer.ask(&Question::Threads { threads })?;
        Ok(peer)
    }

    pub(crate) fn about(&self) -> &About {
        &self.about
    }

    /// Makes the tensors of `cases` and forgets those of earlier ones.
    pub(crate) fn prepare(&mut self, cases: &[&Case]) -> Result<(), Box<dyn Error>> {
        let cases = cases.iter().filter(|case| case.peer).map(|case| Shape::of(case)).collect();
        let Done {} = self.ask(&Question::Cases { cases })?;
        Ok(())
    }

    /// Seconds of one call right after an untimed one.
    pub(crate) fn time(&mut self, case: &Case, form: Form) -> Result<f64, Box<dyn Error>> {
        let Timed { seconds } = self.ask(&Question::Run { run: &case.name, form })?;
        Ok(seconds)
    }

    fn ask<A: DeserializeOwned>(&mut self, question: &Question<'_>) -> Result<A, Box<dyn Error>> {
        let questions = self.questions.as_mut().ok_or("the peer has ended")?;
        let mut line = serde_json::to_string(question)?;
        line.push('\n');
        // a peer that has died says why on stderr; that it does not listen is told by its answer
        let _ = questions.write_all(line.as_bytes());
        let mut answer = String::new();
        if self.answers.read_line(&mut answer)? == 0 {
            return Err(format!("the peer ended without an answer to {}", line.trim_end()).into());
        }
        if let Ok(Failed { error }) = serde_json::from_str(&answer) {
            return Err(format!("the peer cannot answer {}: {error}", line.trim_end()).into());
        }
        let unread = |why| format!("the peer answers {} with {}: {why}", line.trim_end(), answer.trim_end());
        serde_json::from_str(&answer).map_err(|why| unread(why).into())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.questions.take();
        let _ = self.process.wait();
    }
}
