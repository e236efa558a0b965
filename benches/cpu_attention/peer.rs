//! The peer: torch in a separate process (`benches/peers/torch_sdpa.py`), driven by one JSON request per timed call.

use crate::case::{CacheDtype, Case, Form};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    error::Error,
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/torch_sdpa.py");

/// A running peer; the process ends when this is dropped.
pub(crate) struct Peer {
    process: Child,
    /// Dropped to end the peer, which exits at end of input.
    requests: Option<ChildStdin>,
    responses: BufReader<ChildStdout>,
    info: PeerInfo,
}

/// Version and threads reported by the peer.
#[derive(Deserialize)]
pub(crate) struct PeerInfo {
    pub(crate) version: String,
    pub(crate) threads: usize,
}

#[derive(Serialize)]
#[serde(untagged)]
enum PeerRequest<'a> {
    Threads { threads: usize },
    Cases { cases: Vec<PeerCase<'a>> },
    Run { run: &'a str, form: Form },
}

/// The fields of a case sent to the peer.
#[derive(Serialize)]
struct PeerCase<'a> {
    name: &'a str,
    heads: [usize; 2],
    head_dim: usize,
    dtype: CacheDtype,
    requests: usize,
    qo_len: usize,
    kv_len: usize,
}

impl<'a> PeerCase<'a> {
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
    /// Starts the peer with `threads` threads.
    pub(crate) fn start(python: &str, threads: usize) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(python);
        command.arg(SCRIPT).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(|why| format!("--peer {python} does not start: {why}"))?;
        let requests = process.stdin.take();
        let responses = BufReader::new(process.stdout.take().ok_or("the peer has no stdout")?);
        let info = PeerInfo { version: String::new(), threads };
        let mut peer = Self { process, requests, responses, info };
        peer.info = peer.send(&PeerRequest::Threads { threads })?;
        Ok(peer)
    }

    pub(crate) fn info(&self) -> &PeerInfo {
        &self.info
    }

    /// Allocates the tensors of `cases` and frees those of earlier ones.
    pub(crate) fn prepare(&mut self, cases: &[&Case]) -> Result<(), Box<dyn Error>> {
        let cases = cases.iter().filter(|case| case.peer).map(|case| PeerCase::of(case)).collect();
        let Done {} = self.send(&PeerRequest::Cases { cases })?;
        Ok(())
    }

    /// Seconds of one call after an untimed warm-up call.
    pub(crate) fn time(&mut self, case: &Case, form: Form) -> Result<f64, Box<dyn Error>> {
        let Timed { seconds } = self.send(&PeerRequest::Run { run: &case.name, form })?;
        Ok(seconds)
    }

    fn send<A: DeserializeOwned>(&mut self, request: &PeerRequest<'_>) -> Result<A, Box<dyn Error>> {
        let requests = self.requests.as_mut().ok_or("the peer has ended")?;
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        // a write error is ignored: a dead peer has an empty response, and its reason is on stderr
        let _ = requests.write_all(line.as_bytes());
        let mut answer = String::new();
        if self.responses.read_line(&mut answer)? == 0 {
            return Err(format!("the peer ended without an answer to {}", line.trim_end()).into());
        }
        if let Ok(Failed { error }) = serde_json::from_str(&answer) {
            return Err(format!("the peer cannot answer {}: {error}", line.trim_end()).into());
        }
        let invalid = |why| format!("the peer answers {} with {}: {why}", line.trim_end(), answer.trim_end());
        serde_json::from_str(&answer).map_err(|why| invalid(why).into())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.requests.take();
        let _ = self.process.wait();
    }
}
