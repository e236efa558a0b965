//! The sampling operators, with the kernels of `tilewright_kernels::sampling`; one file per group.
//!
//! Logits and probabilities stay on the device. Calls upload parameters of the host and read back outcomes, except
//! [`sample_tensors`] and [`distribution_tensors`], whose parameters are in device memory.

mod distribution;
mod edit;
mod logprobs;
mod sample;
mod speculative;
mod top_k;

pub(super) use distribution::{distribution, distribution_tensors, filter};
pub(super) use edit::edit_logits;
pub(super) use logprobs::logprobs;
pub(super) use sample::{sample, sample_tensors};
pub(super) use speculative::{chain_speculative_sampling, chain_tensors};
pub(super) use top_k::{top_k, top_k_mask_tensors, top_k_transform};

use super::Gpu;
use crate::machine::Machine;
use tilewright::{DeviceMemory, Error, Result, SamplingParams, sampling::Scores};
use tilewright_kernels::sampling::{
    INVALID_VALUE, RequestSources, RowKind, SamplingKernel, VALID, request_words,
};

/// The vocabulary size as a kernel argument.
fn vocab_of(operator: &'static str, vocab: usize) -> Result<u32> {
    const MAX_VOCAB: usize = 1 << 30;
    tilewright::ensure!(
        vocab <= MAX_VOCAB,
        operator,
        "vocab = {vocab}, expected at most {MAX_VOCAB} on a GPU"
    );
    Ok(vocab as u32)
}

fn kind_of(scores: &Scores<'_>) -> RowKind {
    match scores {
        Scores::Logits(_) => RowKind::Logits,
        Scores::Probs(_) => RowKind::Probs,
    }
}

/// The error of a row's outcome, if any.
fn row_error(kind: RowKind, outcome: &[u32]) -> Option<String> {
    let (numbers, nothing) = match kind {
        RowKind::Probs => ("probabilities", "every probability is 0"),
        RowKind::Logits | RowKind::Scores => ("logits", "every logit is -inf"),
    };
    match outcome[0] {
        VALID => None,
        INVALID_VALUE => {
            Some(format!("{numbers} hold {} at token {}", f32::from_bits(outcome[2]), outcome[1]))
        }
        _ => Some(nothing.to_owned()),
    }
}

impl<M: Machine> Gpu<M> {
    fn sampling_kernel(&self, operator: &'static str, kernel: SamplingKernel) -> Result<M::Function> {
        self.kernel(operator, &kernel.name(), |name| kernel.record(name))
    }

    fn upload_words(&self, words: impl IntoIterator<Item = u32>) -> Result<DeviceMemory> {
        self.upload(bytemuck::cast_slice(&words.into_iter().collect::<Vec<u32>>()))
    }

    /// Uploads requests; the returned memory must live until the work is submitted.
    fn upload_requests(&self, params: &[SamplingParams]) -> Result<(RequestSources, DeviceMemory)> {
        let memory = self.upload_words(params.iter().flat_map(request_words))?;
        Ok((RequestSources::records(memory.address()), memory))
    }

    /// The first `count` words of memory, after all work.
    fn read_words(&self, memory: &DeviceMemory, count: usize) -> Result<Vec<u32>> {
        let mut words = vec![0_u32; count];
        self.machine.read(memory.address(), bytemuck::cast_slice_mut(&mut words))?;
        Ok(words)
    }
}

fn error_of(operator: &'static str, request: usize, why: &str) -> Error {
    Error::new(operator, format!("request {request}: {why}"))
}
