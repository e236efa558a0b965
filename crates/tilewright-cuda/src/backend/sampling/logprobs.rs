//! Log-probabilities: the device computes ranks and sums, the host takes logarithms in f64.

use super::{error_of, row_error, vocab_of};
use crate::{
    backend::{Gpu, geometry::address},
    machine::Machine,
};
use tilewright::{
    Result,
    sampling::{LogprobQuery, Logprobs, TokenLogprob},
};
use tilewright_kernels::sampling::{
    LOGPROBS_WORDS, RowKind, SamplingKernel, large_kernel_threads, mass_bits,
};
use tilewright_ptx::Arg;

const OPERATOR: &str = "sampling.logprobs";

pub(in crate::backend) fn logprobs<M: Machine>(gpu: &Gpu<M>, operator: LogprobQuery<'_>) -> Result<()> {
    let LogprobQuery { logits, params, choices, out } = operator;
    let [rows, vocab] = [logits.shape()[0], logits.shape()[1]];
    let columns = vocab_of(OPERATOR, vocab)?;
    if rows == 0 {
        return Ok(());
    }
    let threads = large_kernel_threads(vocab);
    let kernel = gpu.sampling_kernel(OPERATOR, SamplingKernel::Logprobs(logits.dtype(), threads))?;
    let most = choices.iter().map(|choice| choice.top_n).max().unwrap_or(0) as usize;
    let (requests, _uploaded) = gpu.upload_requests(params)?;
    let choice_words = gpu.upload_words(choices.iter().flat_map(|choice| [choice.token, choice.top_n]))?;
    let answers = gpu.allocate(rows * LOGPROBS_WORDS * 4)?;
    // rows that request fewer tokens, and invalid ones, write only a part
    let tops = gpu.allocate((rows * most * 8).max(8))?;
    gpu.machine.fill(answers.address(), 0, answers.bytes())?;
    gpu.machine.fill(tops.address(), 0, tops.bytes())?;
    let args = [
        Arg::U64(address(&logits)),
        Arg::U64(choice_words.address()),
        Arg::U64(answers.address()),
        Arg::U64(tops.address()),
        Arg::U64(logits.strides()[0] as u64),
        Arg::U32(columns),
        Arg::U32(most as u32),
    ];
    gpu.machine.launch(&kernel, [rows as u32, 1, 1], &[&args[..], &requests.args()].concat())?;
    let answers = gpu.read_words(&answers, rows * LOGPROBS_WORDS)?;
    let tops = gpu.read_words(&tops, rows * most * 2)?;
    for (row, out) in out.iter_mut().enumerate() {
        let answer = &answers[row * LOGPROBS_WORDS..][..LOGPROBS_WORDS];
        *out = match row_error(RowKind::Logits, answer) {
            Some(why) => Err(error_of(OPERATOR, row, &why)),
            None => {
                let scale = LogprobScale::new(answer, columns, params[row].temperature);
                let top = &tops[row * most * 2..][..choices[row].top_n as usize * 2];
                Ok(scale.answer(choices[row].token, answer, top))
            }
        };
    }
    Ok(())
}

/// Converts a logit to a log-probability: `(logit - max) / temperature - log_mass`.
struct LogprobScale {
    max: f64,
    temperature: f64,
    log_mass: f64,
}

impl LogprobScale {
    fn new(answer: &[u32], vocab: u32, temperature: f32) -> Self {
        let mass = u64::from(answer[9]) << 32 | u64::from(answer[8]);
        let of_maximum = 2_f64.powi(mass_bits(vocab) as i32 - 1);
        Self {
            max: f64::from(f32::from_bits(answer[4])),
            // at temperature 0 only one logit is left, whose log-probability is 0 at any temperature
            temperature: if temperature == 0.0 { 1.0 } else { f64::from(temperature) },
            log_mass: (mass as f64 / of_maximum).ln(),
        }
    }

    fn of(&self, token: u32, logit: u32, rank: u32) -> TokenLogprob {
        let logit = f64::from(f32::from_bits(logit));
        let logprob = ((logit - self.max) / self.temperature - self.log_mass) as f32;
        TokenLogprob { token, logprob, rank }
    }

    fn answer(&self, token: u32, answer: &[u32], top: &[u32]) -> Logprobs {
        let top = top.chunks_exact(2).zip(1..).map(|(entry, rank)| self.of(entry[0], entry[1], rank));
        Logprobs { chosen: self.of(token, answer[5], answer[6]), top: top.collect() }
    }
}
