//! Samplers and filters of scores: their arguments in the form of the Python extension's operators.

use super::abi::{Arguments, Failure, Outcome, backend_of};
use crate::{
    PerRow, TensorArg, TokenParams,
    sampling::{DrawTensors, FilterFields, mask_top_k, write_distribution},
    speculative::ChainInputs,
    token_params::NumberArg,
};
use tilewright::{Error, ErrorKind, Result, sampling::TensorChain, tensor::IndicesMut};

/// The distance of the offsets of two tokens if all have one: the numbers that a token takes from its random stream.
const OFFSET_STEP: u32 = 4;

/// A tensor at `at`, or else the number after it.
fn counter(call: &Arguments<'_>, at: usize) -> Result<Option<NumberArg<u64>>, Failure> {
    Ok(Some(match call.optional(at)? {
        Some(tensor) => NumberArg::Tensor(Box::new(tensor)),
        None => NumberArg::Number(call.int(at + 1)?.cast_unsigned()),
    }))
}

fn number(call: &Arguments<'_>, at: usize) -> Result<Option<NumberArg<f64>>, Failure> {
    Ok(Some(match call.optional(at)? {
        Some(tensor) => NumberArg::Tensor(Box::new(tensor)),
        None => NumberArg::Number(call.float(at + 1)?),
    }))
}

/// Seeds and offsets from `at` on. Rows with one offset draw from different parts of their stream, so that equal rows draw
/// different tokens.
fn streams(call: &Arguments<'_>, at: usize, rows: usize) -> Result<TokenParams, Failure> {
    let offset = counter(call, at + 2)?;
    let is_each = matches!(&offset, Some(NumberArg::Tensor(offsets)) if offsets.len() == rows && rows != 1);
    let offset_step = if is_each { 0 } else { OFFSET_STEP };
    Ok(TokenParams { seed: counter(call, at)?, offset, offset_step, ..TokenParams::default() })
}

pub(super) fn sampling_from_logits(call: &Arguments<'_>) -> Outcome {
    let (logits, tokens, rows) = (call.tensor(0)?, call.tensor(1)?, call.optional(2)?);
    call.int(3)?; // all samplers are deterministic
    let params = streams(call, 4, tokens.len())?;
    let (_, backend) = backend_of(&logits)?;
    DrawTensors(logits, tokens, None, rows).run(&backend, false, &params)?;
    Ok(None)
}

/// Draws from probabilities: `probs, output, valid, indices`, parameters of filters, `deterministic` at `at`, seeds and offsets.
fn draw(call: &Arguments<'_>, at: usize, filters: TokenParams) -> Outcome {
    let (probs, tokens) = (call.tensor(0)?, call.tensor(1)?);
    let (valid, rows) = (call.optional(2)?.map(TensorArg::flags), call.optional(3)?);
    call.int(at)?; // all samplers are deterministic
    let TokenParams { seed, offset, offset_step, .. } = streams(call, at + 1, tokens.len())?;
    let (_, backend) = backend_of(&probs)?;
    DrawTensors(probs, tokens, valid, rows).run(
        &backend,
        true,
        &TokenParams { seed, offset, offset_step, ..filters },
    )?;
    Ok(None)
}

pub(super) fn sampling_from_probs(call: &Arguments<'_>) -> Outcome {
    draw(call, 4, TokenParams::default())
}

pub(super) fn top_k_sampling_from_probs(call: &Arguments<'_>) -> Outcome {
    draw(call, 6, TokenParams { top_k: number(call, 4)?, ..TokenParams::default() })
}

pub(super) fn top_p_sampling_from_probs(call: &Arguments<'_>) -> Outcome {
    draw(call, 6, TokenParams { top_p: number(call, 4)?, ..TokenParams::default() })
}

pub(super) fn min_p_sampling_from_probs(call: &Arguments<'_>) -> Outcome {
    draw(call, 6, TokenParams { min_p: number(call, 4)?, ..TokenParams::default() })
}

pub(super) fn top_k_top_p_sampling_from_probs(call: &Arguments<'_>) -> Outcome {
    let (top_k, top_p) = (number(call, 4)?, number(call, 6)?);
    draw(call, 8, TokenParams { top_k, top_p, joint: true, ..TokenParams::default() })
}

/// Writes the distribution of the tensor at `from` to the one after it.
fn distribution(call: &Arguments<'_>, from: usize, probs: bool, params: &TokenParams) -> Outcome {
    let (scores, mut out) = (call.tensor(from)?, call.tensor(from + 1)?);
    let (_, backend) = backend_of(&scores)?;
    write_distribution(&backend, probs, params, &scores, &mut out)?;
    Ok(None)
}

pub(super) fn softmax(call: &Arguments<'_>) -> Outcome {
    call.optional(0)?; // the kernel needs no workspace
    call.int(5)?; // a hint
    distribution(call, 1, false, &TokenParams { temperature: number(call, 3)?, ..TokenParams::default() })
}

pub(super) fn top_k_renorm_probs(call: &Arguments<'_>) -> Outcome {
    call.optional(4)?; // the kernel needs no workspace
    distribution(call, 0, true, &TokenParams { top_k: number(call, 2)?, ..TokenParams::default() })
}

pub(super) fn top_p_renorm_probs(call: &Arguments<'_>) -> Outcome {
    call.int(4)?; // it is deterministic
    call.optional(5)?; // the kernel needs no workspace
    distribution(call, 0, true, &TokenParams { top_p: number(call, 2)?, ..TokenParams::default() })
}

pub(super) fn top_k_mask_logits(call: &Arguments<'_>) -> Outcome {
    let (x, mut out) = (call.tensor(0)?, call.tensor(1)?);
    call.optional(4)?; // the kernel needs no workspace
    let (_, backend) = backend_of(&x)?;
    match call.optional(2)? {
        Some(top_k) => mask_top_k(&backend, &x, &top_k, &mut out)?,
        None => {
            let (filter, param) = ("top_k_mask".to_owned(), PerRow::One(call.float(3)?));
            FilterFields { filter, param, x, out }.run(&backend)?;
        }
    }
    Ok(None)
}

pub(super) fn chain_speculative_sampling(call: &Arguments<'_>) -> Outcome {
    let (draft_probs, draft_ids, target) = (call.tensor(0)?, call.tensor(1)?, call.tensor(2)?);
    let (mut tokens, mut totals) = (call.tensor(3)?, [call.tensor(4)?, call.tensor(5)?]);
    call.int(6)?; // all samplers are deterministic
    if !target.on_host() {
        let text = "target_probs is on a device, expected host memory";
        return Err(Error::new(call.operator, text).with_kind(ErrorKind::Unsupported).into());
    }
    let batch = target.shape().first().copied().unwrap_or(0);
    let ids = draft_ids.host_integers(call.operator, "draft_token_ids")?;
    for (total, name) in totals.iter().zip(["output_accepted_token_num", "output_emitted_draft_token_num"]) {
        if total.len() != batch || !total.on_host() {
            let text = format!(
                "{name} has shape {:?}, expected [batch_size] = [{batch}] on the host",
                total.shape()
            );
            return Err(Error::new(call.operator, text).into());
        }
    }
    let mut outcomes = vec![0; batch * TensorChain::OUTCOME_WORDS];
    let inputs =
        ChainInputs { draft_probs: &draft_probs, draft_ids: &draft_ids, ids: ids.into(), target: &target };
    let (_, backend) = backend_of(&target)?;
    let params = streams(call, 7, batch)?;
    inputs.verify(&backend, &params, &mut tokens, IndicesMut::from(&mut outcomes))?;
    for (total, column) in totals.iter_mut().zip([TensorChain::ACCEPTED, TensorChain::EMITTED]) {
        let counts = outcomes.chunks(TensorChain::OUTCOME_WORDS).map(|words| words[column]);
        for (total, count) in total.host_integers_mut(call.operator, "a total")?.iter_mut().zip(counts) {
            *total += count;
        }
    }
    Ok(None)
}
