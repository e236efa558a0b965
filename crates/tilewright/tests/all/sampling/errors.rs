//! Error texts of the sampling operators.

use crate::arrays::{Array, Layout};
use tilewright::{
    Cpu, Dtype, Indices, Operator, Result, SamplingParams, View, ViewMut,
    sampling::{
        Sampled, Scores, TensorParam, TensorParams, TensorSampling, TokenBitmask, apply_token_bitmask,
        distribution, sample, sampling_from_probs, softmax, top_k_mask_logits, top_k_renorm_probs,
        top_p_renorm_probs,
    },
};

#[test]
fn refusals_name_request_and_value() {
    let cpu = Cpu::with_threads(1).unwrap();
    let logits = Array::zeros(Dtype::F32, &[3, 4], Layout::Dense);
    let good = SamplingParams::default();
    let refuse = |bad: SamplingParams| {
        let mut out = vec![Ok(9); 3];
        let text = sample(&cpu, logits.view(), &[good, good, bad], &mut out).unwrap_err().to_string();
        assert_eq!(out, [Ok(9), Ok(9), Ok(9)], "a refused call draws nothing");
        assert_eq!(bad.validate().unwrap_err().to_string(), text.replace("sample: request 2", "params"));
        text
    };
    let cases = [
        (SamplingParams { top_p: 1.5, ..good }, "top_p = 1.5 is not in (0, 1]"),
        (SamplingParams { top_p: 0.0, ..good }, "top_p = 0 is not in (0, 1]"),
        (SamplingParams { top_p: f32::NAN, ..good }, "top_p = NaN is not in (0, 1]"),
        (SamplingParams { top_k: Some(0), ..good }, "top_k = 0 is not at least 1"),
        (SamplingParams { min_p: -0.1, ..good }, "min_p = -0.1 is not in [0, 1]"),
        (SamplingParams { min_p: f32::NAN, ..good }, "min_p = NaN is not in [0, 1]"),
        (SamplingParams { temperature: -1.0, ..good }, "temperature = -1 is not a finite number >= 0"),
        (SamplingParams { temperature: f32::NAN, ..good }, "temperature = NaN is not a finite number >= 0"),
        (
            SamplingParams { temperature: f32::INFINITY, ..good },
            "temperature = inf is not a finite number >= 0",
        ),
    ];
    for (bad, text) in cases {
        assert_eq!(refuse(bad), format!("sampling.sample: request 2: {text}"));
    }
}

#[test]
fn refusals_name_shapes() {
    let cpu = Cpu::with_threads(1).unwrap();
    let good = SamplingParams::default();
    let x = Array::zeros(Dtype::F32, &[3, 4], Layout::Dense);
    let mut out = vec![Ok(0); 3];
    let text = |result: Result<()>| result.unwrap_err().to_string();
    assert_eq!(
        text(sample(&cpu, x.view(), &[good; 2], &mut out)),
        "sampling.sample: params has 2 elements, expected rows = 3"
    );
    assert_eq!(
        text(sample(&cpu, x.view(), &[good; 3], &mut out[..2])),
        "sampling.sample: out has 2 elements, expected rows = 3"
    );
    let empty = Array::zeros(Dtype::F32, &[3, 0], Layout::Dense);
    assert_eq!(
        text(sample(&cpu, empty.view(), &[good; 3], &mut out)),
        "sampling.sample: logits has shape [3, 0], expected [rows, vocab] with vocab > 0"
    );
    let warm = SamplingParams { temperature: 0.7, ..good };
    assert_eq!(
        text(sampling_from_probs(&cpu, x.view(), &[good, warm, good], &mut out)),
        "sampling.sampling_from_probs: request 1: temperature = 0.7 applies to logits, expected 1 for probabilities"
    );
    let mut y = Array::zeros(Dtype::F32, &[3, 5], Layout::Dense);
    assert_eq!(
        text(softmax(&cpu, x.view(), &[1.0; 3], y.view_mut())),
        "sampling.softmax: out has shape [3, 5], expected [rows, vocab] = [3, 4]"
    );
    let mut y = Array::zeros(Dtype::F16, &[3, 4], Layout::Dense);
    assert_eq!(
        text(top_k_mask_logits(&cpu, x.view(), &[1; 3], y.view_mut())),
        "sampling.top_k_mask_logits: out is f16, expected f32"
    );
    let mut y = x.clone();
    assert_eq!(
        text(top_k_renorm_probs(&cpu, x.view(), &[1, 0, 1], y.view_mut())),
        "sampling.top_k_renorm_probs: request 1: top_k = 0 is not at least 1"
    );
    assert_eq!(
        text(top_p_renorm_probs(&cpu, x.view(), &[1.0; 2], y.view_mut())),
        "sampling.top_p_renorm_probs: top_p has 2 elements, expected rows = 3"
    );
    let mut none: [Sampled; 0] = [];
    let no_rows = Array::zeros(Dtype::F32, &[0, 4], Layout::Dense);
    sample(&cpu, no_rows.view(), &[], &mut none).unwrap();
}

#[test]
fn a_distribution_is_refused_by_name_and_a_bad_row_becomes_nan() {
    let cpu = Cpu::with_threads(1).unwrap();
    let good = SamplingParams::default();
    let values = [0.0, 1.0, f32::NAN, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY];
    let x = Array::new(Dtype::F32, &[3, 2], Layout::Dense, &values);
    let mut out = Array::zeros(Dtype::F16, &[3, 2], Layout::Dense);
    distribution(&cpu, Scores::Logits(x.view()), &[good; 3], out.view_mut()).unwrap();
    let found = out.values();
    assert!((found[0] + found[1] - 1.0).abs() < 1e-3 && found[2..].iter().all(|p| p.is_nan()));

    let mut refuse = |scores, params: &[SamplingParams]| {
        distribution(&cpu, scores, params, out.view_mut()).unwrap_err().to_string()
    };
    let warm = SamplingParams { temperature: 0.5, ..good };
    assert_eq!(
        refuse(Scores::Logits(x.view()), &[good; 2]),
        "sampling.distribution: params has 2 elements, expected rows = 3"
    );
    assert_eq!(
        refuse(Scores::Probs(x.view()), &[warm; 3]),
        "sampling.distribution: request 0: temperature = 0.5 applies to logits, expected 1 for probabilities"
    );
    let narrow = Array::zeros(Dtype::F32, &[3, 1], Layout::Dense);
    assert_eq!(
        refuse(Scores::Probs(narrow.view()), &[good; 3]),
        "sampling.distribution: out has shape [3, 2], expected [rows, vocab] = [3, 1]"
    );
}

#[test]
fn logits_that_are_edited_have_a_dense_last_axis() {
    let mut data = [0.0f32; 12];
    let logits = ViewMut::strided(&mut data[..], &[2, 3], &[6, 2]).unwrap();
    let bitmask = TokenBitmask { words: (&[1, 1]).into(), rows: None };
    assert_eq!(
        apply_token_bitmask(&Cpu::with_threads(1).unwrap(), logits, bitmask).unwrap_err().to_string(),
        "sampling.apply_token_bitmask: logits has stride 2 along its last axis, expected 1"
    );
}

#[test]
fn refusals_of_tensors_name_argument_and_value() {
    let cpu = Cpu::with_threads(1).unwrap();
    let x = Array::zeros(Dtype::F32, &[3, 4], Layout::Dense);
    let halves = Array::zeros(Dtype::F16, &[3], Layout::Dense);
    let text = |scores: Scores<'_>, params: TensorParams<'_>, rows: Option<&[i32]>| {
        let (mut tokens, mut valid) = (vec![9; 3], vec![9_i8; 3]);
        let (rows, flags) = (rows.map(Indices::from), ViewMut::new(&mut valid[..], &[3]).unwrap());
        let call = TensorSampling { scores, rows, params, tokens: (&mut tokens).into(), valid: Some(flags) };
        let text = call.run(&cpu).unwrap_err().to_string();
        assert_eq!((tokens, valid), (vec![9; 3], vec![9; 3]), "a refused call draws nothing");
        text
    };
    let plain = TensorParams::default();
    let floats = |values: &'static [f32]| TensorParam::Each(View::new(values, &[values.len()]).unwrap());
    let cases = [
        (
            TensorParams { top_p: floats(&[0.5, 1.5, 0.5]), ..plain },
            "request 1: top_p = 1.5 is not in (0, 1]",
        ),
        (
            TensorParams { top_k: TensorParam::Each((&[1, 2, -3]).into()), ..plain },
            "request 2: top_k = -3 is not at least 1",
        ),
        (
            TensorParams { temperature: TensorParam::All(-1.0), ..plain },
            "request 0: temperature = -1 is not a finite number >= 0",
        ),
        (
            TensorParams { min_p: floats(&[0.5, 0.1]), ..plain },
            "min_p has shape [2], expected [tokens] = [3]",
        ),
        (
            TensorParams { top_k: TensorParam::Each((&[1]).into()), ..plain },
            "top_k has 1 elements, expected tokens = 3",
        ),
        (
            TensorParams { seed: TensorParam::Each((&[1, 2]).into()), ..plain },
            "seed has 2 elements, expected 1 or tokens = 3",
        ),
        (TensorParams { top_p: TensorParam::Each(halves.view()), ..plain }, "top_p is f16, expected f32"),
        (
            TensorParams { top_p: TensorParam::Each(x.view()), ..plain },
            "top_p has shape [3, 4], expected [tokens] = [3]",
        ),
    ];
    for (params, expected) in cases {
        let found = text(Scores::Logits(x.view()), params, None);
        assert_eq!(found, format!("sampling.sample: {expected}"));
    }
    let found = |params, rows| text(Scores::Probs(x.view()), params, rows);
    let of = |text: &str| format!("sampling.sampling_from_probs: {text}");
    assert_eq!(found(plain, Some(&[0, 3, 1])), of("rows[1] = 3 is not in 0..3"));
    assert_eq!(found(plain, Some(&[0, 1])), of("tokens has 3 elements, expected the row numbers = 2"));
    assert_eq!(
        found(TensorParams { temperature: floats(&[1.0; 3]), ..plain }, None),
        of("temperature is a tensor, expected 1 for probabilities")
    );
    let warm = TensorParams { temperature: TensorParam::All(0.5), ..plain };
    assert_eq!(found(warm, None), of("temperature = 0.5 applies to logits, expected 1 for probabilities"));
}
