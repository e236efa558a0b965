//! The peer: torch in a separate process (`benches/peers/torch_sdpa.py`), driven by one JSON request per timed call.

#[path = "../peers/process.rs"]
mod process;

use crate::case::{Case, Form};
use process::PeerProcess;
use serde::Deserialize;
use serde_json::{Value, json};
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

/// The fields of a case sent to the peer.
fn fields(case: &Case) -> Value {
    json!({
        "name": case.name, "heads": case.heads, "head_dim": case.head_dim, "dtype": case.dtype,
        "requests": case.requests, "qo_len": case.qo_len, "kv_len": case.kv_len,
    })
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
        let info = process.request(&json!({ "threads": threads }).to_string())?;
        Ok(Self { process, info })
    }

    /// Allocates the tensors of `cases` and frees those of earlier ones.
    pub(crate) fn prepare(&mut self, cases: &[&Case]) -> Result<(), Box<dyn Error>> {
        let cases: Vec<Value> = cases.iter().filter(|case| case.peer).map(|case| fields(case)).collect();
        let Done {} = self.process.request(&json!({ "cases": cases }).to_string())?;
        Ok(())
    }

    /// Seconds of one call after an untimed warm-up call.
    pub(crate) fn time(&mut self, case: &Case, form: Form) -> Result<f64, Box<dyn Error>> {
        let Timed { seconds } =
            self.process.request(&json!({ "run": case.name, "form": form }).to_string())?;
        Ok(seconds)
    }
}
