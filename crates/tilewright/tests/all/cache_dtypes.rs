//! Operators outside of KV caches reject 8-bit tensors, naming operator, argument and dtype.

use crate::elements::Elements;
use half::bf16;
use tilewright::{
    Cpu, Dtype, Element, Result, View, ViewMut,
    activation::{gelu_and_mul, silu_and_mul},
    attention::{merge_state, merge_states},
    gemm::linear,
    norm::{fused_add_rmsnorm, rmsnorm, rmsnorm_in_place},
    rope::{CosSinCache, Positions, Rope, apply_rope, apply_rope_with_cos_sin_cache},
    sampling::{
        Bias, ChainOutput, Choice, Drafts, Pipeline, SamplingParams, Scores, TieBreak, TokenBitmask, TopK,
        apply_logit_bias, apply_token_bitmask, chain_speculative_sampling, distribution, logprobs, sample,
        sampling_from_probs, softmax, top_k, top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs,
    },
};

/// Zeros of an 8-bit dtype, of bf16 and of f32, enough for every call here.
struct Memory {
    narrow: [Elements; 2],
    wide: [Elements; 2],
    f32s: Elements,
}

impl Memory {
    fn new(dtype: Dtype) -> Self {
        let zeros = |dtype| Elements::filled(dtype, 64, 0.0);
        let pair = |dtype| [zeros(dtype), zeros(dtype)];
        Self { narrow: pair(dtype), wide: pair(Dtype::Bf16), f32s: zeros(Dtype::F32) }
    }

    /// The narrow, the wide and the f32 tensors.
    fn tensors(&mut self) -> ([&mut Elements; 2], [&mut Elements; 2], &mut Elements) {
        (self.narrow.each_mut(), self.wide.each_mut(), &mut self.f32s)
    }
}

impl Elements {
    /// A view of the first elements.
    fn get(&self, shape: &[usize]) -> View<'_> {
        self.strided(0, shape, &dense(shape))
    }

    fn get_mut(&mut self, shape: &[usize]) -> ViewMut<'_> {
        self.strided_mut(0, shape, &dense(shape))
    }
}

fn dense(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect()
}

/// Makes the call for each 8-bit dtype and asserts the error `text`, in which `8-BIT` stands for the dtype.
#[track_caller]
fn refused(text: &str, call: impl Fn(&Cpu, &mut Memory) -> Result<()>) {
    for dtype in [Dtype::E4m3, Dtype::E5m2, Dtype::I8] {
        let result = call(&Cpu::with_threads(1).unwrap(), &mut Memory::new(dtype));
        let text = format!("{}, expected f32, f16 or bf16", text.replace("8-BIT", &dtype.to_string()));
        assert_eq!(result.expect_err("it is refused").to_string(), text);
    }
}

#[test]
fn norms() {
    refused("norm.rmsnorm: x is 8-BIT", |cpu, memory| {
        let ([x, out], [weight, _], _) = memory.tensors();
        rmsnorm(cpu, x.get(&[2, 4]), weight.get(&[4]), 1e-6, out.get_mut(&[2, 4]))
    });
    refused("norm.rmsnorm: weight is 8-BIT", |cpu, memory| {
        let ([weight, _], [x, out], _) = memory.tensors();
        rmsnorm(cpu, x.get(&[2, 4]), weight.get(&[4]), 1e-6, out.get_mut(&[2, 4]))
    });
    refused("norm.rmsnorm: out is 8-BIT", |cpu, memory| {
        let ([out, _], [x, weight], _) = memory.tensors();
        rmsnorm(cpu, x.get(&[2, 4]), weight.get(&[4]), 1e-6, out.get_mut(&[2, 4]))
    });
    refused("norm.rmsnorm_in_place: x is 8-BIT", |cpu, memory| {
        let ([x, _], [weight, _], _) = memory.tensors();
        rmsnorm_in_place(cpu, x.get_mut(&[2, 4]), weight.get(&[4]), 1e-6)
    });
    refused("norm.fused_add_rmsnorm: x is 8-BIT", |cpu, memory| {
        let ([x, residual], [weight, _], _) = memory.tensors();
        fused_add_rmsnorm(cpu, x.get_mut(&[2, 4]), residual.get_mut(&[2, 4]), weight.get(&[4]), 1e-6)
    });
}

#[test]
fn activations_and_products() {
    refused("activation.silu_and_mul: x is 8-BIT", |cpu, memory| {
        let ([x, out], _, _) = memory.tensors();
        silu_and_mul(cpu, x.get(&[2, 4]), out.get_mut(&[2, 2]))
    });
    refused("activation.gelu_and_mul: x is 8-BIT", |cpu, memory| {
        let ([x, out], _, _) = memory.tensors();
        gelu_and_mul(cpu, x.get(&[2, 4]), out.get_mut(&[2, 2]))
    });
    refused("activation.silu_and_mul: out is 8-BIT", |cpu, memory| {
        let ([out, _], [x, _], _) = memory.tensors();
        silu_and_mul(cpu, x.get(&[2, 4]), out.get_mut(&[2, 2]))
    });
    refused("gemm.linear: weight is 8-BIT", |cpu, memory| {
        let ([weight, _], _, out) = memory.tensors();
        let x = [0.0_f32; 8];
        linear(cpu, View::new(&x[..], &[2, 4])?, weight.get(&[3, 4]), None, out.get_mut(&[2, 3]))
    });
    refused("gemm.linear: bias is 8-BIT", |cpu, memory| {
        let ([bias, _], [weight, _], out) = memory.tensors();
        let (x, bias) = ([0.0_f32; 8], bias.get(&[3]));
        linear(cpu, View::new(&x[..], &[2, 4])?, weight.get(&[3, 4]), Some(bias), out.get_mut(&[2, 3]))
    });
}

#[test]
fn rotary_embeddings_and_merges() {
    let rope = Rope::new(4, 1e4).expect("it is sound");
    let positions = [0, 1];
    refused("rope.apply: q is 8-BIT", |cpu, memory| {
        let ([q, _], [k, _], _) = memory.tensors();
        apply_rope(cpu, q.get_mut(&[2, 1, 4]), k.get_mut(&[2, 1, 4]), Positions::Ids(&positions), &rope)
    });
    refused("rope.apply_with_cos_sin_cache: k is 8-BIT", |cpu, memory| {
        let ([k, _], [q, _], _) = memory.tensors();
        let (q, k, cache) = (
            q.get_mut(&[2, 1, 4]),
            k.get_mut(&[2, 1, 4]),
            CosSinCache::new(&rope, 8).expect("a small table"),
        );
        apply_rope_with_cos_sin_cache(cpu, q, k, Positions::Ids(&positions), &cache)
    });
    refused("attention.merge_states: o is 8-BIT", |cpu, memory| {
        let ([o, out], _, f32s) = memory.tensors();
        let lse = [0.0_f32; 6];
        let lse = View::new(&lse[..], &[2, 3, 1])?;
        merge_states(cpu, o.get(&[2, 3, 1, 4]), lse, out.get_mut(&[2, 1, 4]), f32s.get_mut(&[2, 1]))
    });
    refused("attention.merge_state: o is 8-BIT", |cpu, memory| {
        let ([o, other], _, f32s) = memory.tensors();
        let lse = [0.0_f32; 2];
        let lse = View::new(&lse[..], &[2, 1])?;
        merge_state(cpu, o.get_mut(&[2, 1, 4]), f32s.get_mut(&[2, 1]), other.get(&[2, 1, 4]), lse)
    });
}

#[test]
fn filters() {
    let shape = [2, 4];
    refused("sampling.softmax: logits is 8-BIT", |cpu, memory| {
        let ([x, out], _, _) = memory.tensors();
        softmax(cpu, x.get(&shape), &[1.0; 2], out.get_mut(&shape))
    });
    refused("sampling.top_k_renorm_probs: probs is 8-BIT", |cpu, memory| {
        let ([x, out], _, _) = memory.tensors();
        top_k_renorm_probs(cpu, x.get(&shape), &[1; 2], out.get_mut(&shape))
    });
    refused("sampling.top_p_renorm_probs: probs is 8-BIT", |cpu, memory| {
        let ([x, out], _, _) = memory.tensors();
        top_p_renorm_probs(cpu, x.get(&shape), &[1.0; 2], out.get_mut(&shape))
    });
    refused("sampling.top_k_mask_logits: logits is 8-BIT", |cpu, memory| {
        let ([x, out], _, _) = memory.tensors();
        top_k_mask_logits(cpu, x.get(&shape), &[1; 2], out.get_mut(&shape))
    });
    refused("sampling.top_k: scores is 8-BIT", |cpu, memory| {
        let ([x, values], _, _) = memory.tensors();
        let select = TopK { k: 1, ties: TieBreak::Lowest, sorted: true };
        top_k(cpu, x.get(&shape), select, values.get_mut(&[2, 1]), &mut [0; 2])
    });
    refused("sampling.apply_token_bitmask: logits is 8-BIT", |cpu, memory| {
        let ([x, _], _, _) = memory.tensors();
        apply_token_bitmask(cpu, x.get_mut(&shape), TokenBitmask { words: (&[1; 2]).into(), rows: None })
    });
    refused("sampling.apply_logit_bias: logits is 8-BIT", |cpu, memory| {
        let ([x, _], _, _) = memory.tensors();
        apply_logit_bias(cpu, x.get_mut(&shape), &[&[Bias { token: 0, bias: 1.0 }], &[]])
    });
}

#[test]
fn draws() {
    let (shape, params) = ([2, 4], [SamplingParams::default(); 2]);
    refused("sampling.sample: logits is 8-BIT", |cpu, memory| {
        let ([x, _], _, _) = memory.tensors();
        sample(cpu, x.get(&shape), &params, &mut [Ok(0), Ok(0)])
    });
    refused("sampling.sampling_from_probs: probs is 8-BIT", |cpu, memory| {
        let ([x, _], _, _) = memory.tensors();
        sampling_from_probs(cpu, x.get(&shape), &params, &mut [Ok(0), Ok(0)])
    });
    refused("sampling.distribution: out is 8-BIT", |cpu, memory| {
        let ([out, _], [x, _], _) = memory.tensors();
        distribution(cpu, Scores::Logits(x.get(&shape)), &params, out.get_mut(&shape))
    });
    refused("sampling.logprobs: logits is 8-BIT", |cpu, memory| {
        let ([x, _], _, _) = memory.tensors();
        logprobs(cpu, x.get(&shape), None, &[Choice { token: 0, top_n: 1 }; 2], &mut [])
    });
    refused("sampling.pipeline: probs is 8-BIT", |cpu, memory| {
        let ([x, _], [out, _], _) = memory.tensors();
        Pipeline::probs().top_p(0.5).run(cpu, x.get_mut(&shape), out.get_mut(&shape))
    });
    refused("sampling.pipeline: out is 8-BIT", |cpu, memory| {
        let ([out, _], [x, _], _) = memory.tensors();
        Pipeline::probs().top_p(0.5).run(cpu, x.get_mut(&shape), out.get_mut(&shape))
    });
}

#[test]
fn speculation() {
    let params = [SamplingParams::default()];
    let chain = |cpu: &Cpu, probs: View<'_>, target: View<'_>| {
        let (mut tokens, mut chains) = ([0; 2], [Ok(Default::default())]);
        let out = ChainOutput { tokens: &mut tokens, chains: &mut chains, totals: None };
        chain_speculative_sampling(cpu, Drafts { probs, ids: &[0] }, Scores::Probs(target), &params, out)
    };
    refused("sampling.chain_speculative_sampling: target probs is 8-BIT", |cpu, memory| {
        let ([target, _], [probs, _], _) = memory.tensors();
        chain(cpu, probs.get(&[1, 1, 4]), target.get(&[1, 2, 4]))
    });
    refused("sampling.chain_speculative_sampling: draft probs is 8-BIT", |cpu, memory| {
        let ([probs, _], [target, _], _) = memory.tensors();
        chain(cpu, probs.get(&[1, 1, 4]), target.get(&[1, 2, 4]))
    });
}

/// All upper halves with halfway cases and their adjacent values.
#[test]
fn bf16_rounds_as_the_library_does() {
    for upper in 0..=u32::from(u16::MAX) {
        for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let value = f32::from_bits(upper << 16 | lower);
            let (ours, theirs) = (<bf16 as Element>::from_f32(value), bf16::from_f32(value));
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{value:e}, {:#x}", value.to_bits());
        }
    }
}
