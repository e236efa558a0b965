//! The peer: torch in a separate process (`benches/peers/torch_sdpa.py`), driven by one JSON request per timed call.

#[path = "../peers/process.rs"]
mod process;

use crate::case::{CacheDtype, Case, Form};
use process::PeerProcess;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::error::Error;

const SCRIPT: &str = include_str!("../peers/torch_sdpa.py");

/// A running peer; the process ends when this is dropped.
pub(crate) struct Peer {
    process: PeerProcess,
    pub(crate) info: PeerInfo,
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

impl Peer {
    /// Starts the peer with `threads` threads.
    pub(crate) fn start(python: &str, threads: usize) -> Result<Self, Box<dyn Error>> {
        let mut process = PeerProcess::start(python, SCRIPT)?;
        let info = send(&mut process, &PeerRequest::Threads { threads })?;
        Ok(Self { process, info })
    }

    /// Allocates the tensors of `cases` and frees those of earlier ones.
    pub(crate) fn prepare(&mut self, cases: &[&Case]) -> Result<(), Box<dyn Error>> {
        let cases = cases.iter().filter(|case| case.peer).map(|case| PeerCase::of(case)).collect();
        let Done {} = send(&mut self.process, &PeerRequest::Cases { cases })?;
        Ok(())
    }

    /// Seconds of one call after an untimed warm-up call.
    pub(crate) fn time(&mut self, case: &Case, form: Form) -> Result<f64, Box<dyn Error>> {
        let Timed { seconds } = send(&mut self.process, &PeerRequest::Run { run: &case.name, form })?;
        Ok(seconds)
    }
}

fn send<A: DeserializeOwned>(
    process: &mut PeerProcess,
    request: &PeerRequest<'_>,
) -> Result<A, Box<dyn Error>> {
    process.request(&serde_json::to_string(request)?)
}
