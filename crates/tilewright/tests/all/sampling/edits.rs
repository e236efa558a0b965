//! Logit edits: bitmask, penalties and bias against their definitions, their errors, and draws from edited logits.

use crate::{Array, DTYPES, F32_UNIT, Layout, assert_drawn_from, draws, random};
use tilewright::{
    Backend, Cpu, Dtype, Result, SamplingParams,
    reference::sampling::{penalised, softmax},
    sampling::{
        Bias, History, Penalties, TokenBitmask, apply_logit_bias, apply_penalties, apply_token_bitmask,
        sample,
    },
};

crate::judge_backends!(
    the_bitmask_selects,
    a_row_without_an_allowed_token_is_reported_when_it_is_sampled,
    penalties_follow_their_formulas_from_tokens_and_from_counts,
    bias_adds_and_excludes,
    draws_from_edited_logits_follow_the_definition
);

const VOCABS: [usize; 6] = [1, 31, 32, 33, 64, 5000];

/// Whether token `t` of `row` is allowed in these tests.
fn allowed(row: usize, t: usize) -> bool {
    (t * 7 + row * 5) % 11 < 4 || t % 64 >= 32 && row % 2 == 1
}

fn words(rows: usize, vocab: usize) -> Vec<i32> {
    let word = |row: usize, w: usize| {
        // bits beyond the vocabulary are set and must be ignored
        (0..32).map(|bit| u32::from(w * 32 + bit >= vocab || allowed(row, w * 32 + bit)) << bit).sum::<u32>()
            as i32
    };
    (0..rows).flat_map(|row| (0..vocab.div_ceil(32)).map(move |w| word(row, w))).collect()
}

fn text(result: Result<()>) -> String {
    result.unwrap_err().to_string()
}

fn the_bitmask_selects<B: Backend>([backend]: &[B; 1]) {
    for dtype in DTYPES {
        for vocab in VOCABS {
            assert_masks(backend, dtype, (5, vocab), None);
            assert_masks(backend, dtype, (5, vocab), Some(&[3, 0, 3]));
            assert_masks(backend, dtype, (5, vocab), Some(&[]));
            assert_masks(backend, dtype, (0, vocab), None);
        }
    }
}

fn assert_masks<B: Backend>(
    backend: &B,
    dtype: Dtype,
    (rows, vocab): (usize, usize),
    chosen: Option<&[u32]>,
) {
    let mut values = random(rows * vocab, 1);
    values.iter_mut().step_by(3).for_each(|value| *value = f32::NAN);
    let mut logits = Array::new(dtype, &[rows, vocab], Layout::Padded, &values);
    let before = logits.bits();
    let words = words(rows, vocab);
    let bitmask = TokenBitmask { words: (&words).into(), rows: chosen };
    apply_token_bitmask(backend, logits.view_mut(), bitmask).unwrap();
    for (i, (&bits, &old)) in logits.bits().iter().zip(&before).enumerate() {
        let (row, t) = (i / vocab, i % vocab);
        let masked = chosen.is_none_or(|rows| rows.contains(&(row as u32)));
        let expected = if masked && !allowed(row, t) { f64::NEG_INFINITY.to_bits() } else { old };
        assert_eq!(bits, expected, "{dtype} vocab {vocab} row {row} token {t} {chosen:?}");
    }
    assert!(logits.gaps_untouched());
}

fn a_row_without_an_allowed_token_is_reported_when_it_is_sampled<B: Backend>([backend]: &[B; 1]) {
    let mut logits = Array::random(Dtype::F32, &[2, 33], Layout::Dense, 2);
    let bitmask = TokenBitmask { words: (&[0, 0, 0, 1]).into(), rows: None };
    apply_token_bitmask(backend, logits.view_mut(), bitmask).unwrap();
    let mut out = [Ok(0), Ok(0)];
    sample(backend, logits.view(), &[SamplingParams::default(); 2], &mut out).unwrap();
    assert_eq!(out[0].as_ref().unwrap_err().to_string(), "sampling.sample: request 0: every logit is -inf");
    assert_eq!(out[1], Ok(32));
}

/// Prompt and output tokens of a row, with repetitions.
fn history(row: usize, vocab: usize) -> (Vec<u32>, Vec<u32>) {
    let list = |len: usize, step: usize| (0..len).map(|i| ((i * step + row) % vocab % 40) as u32).collect();
    (list(row * 5 % 13, 3), list(row * 7 % 23, 5))
}

const PENALTIES: [Penalties; 6] = [
    Penalties { repetition: 1.0, presence: 0.0, frequency: 0.0 },
    Penalties { repetition: 1.3, presence: 0.0, frequency: 0.0 },
    Penalties { repetition: 0.5, presence: 0.0, frequency: 0.0 },
    Penalties { repetition: 1.0, presence: 1.5, frequency: 0.0 },
    Penalties { repetition: 1.0, presence: 0.0, frequency: -0.7 },
    Penalties { repetition: 1.7, presence: 0.25, frequency: 0.5 },
];

fn exactly(logits: &[f64], lists: &(Vec<u32>, Vec<u32>), p: &Penalties) -> Vec<f64> {
    penalised(logits, &lists.0, &lists.1, [p.repetition, p.presence, p.frequency].map(f64::from))
}

fn penalties_follow_their_formulas_from_tokens_and_from_counts<B: Backend>([backend]: &[B; 1]) {
    for dtype in DTYPES {
        for (rows, vocab) in [(0, 7), (6, 7), (24, 33), (12, 5000)] {
            let mut values = random(rows * vocab, 3);
            values.iter_mut().step_by(9).for_each(|value| *value = f32::NEG_INFINITY);
            let original = Array::new(dtype, &[rows, vocab], Layout::Padded, &values);
            let lists: Vec<_> = (0..rows).map(|row| history(row, vocab)).collect();
            let penalties: Vec<_> = (0..rows).map(|row| PENALTIES[row % 6]).collect();
            let (prompt, output): (Vec<_>, Vec<_>) = lists.iter().map(|(p, o)| (&p[..], &o[..])).unzip();
            let mut by_tokens = original.clone();
            let tokens = History::Tokens { prompt: &prompt, output: &output };
            apply_penalties(backend, by_tokens.view_mut(), &penalties, tokens).unwrap();

            let mut seen = vec![false; rows * vocab];
            let mut counts = vec![0; rows * vocab];
            for (row, (prompt, output)) in lists.iter().enumerate() {
                prompt.iter().for_each(|&t| seen[row * vocab + t as usize] = true);
                output.iter().for_each(|&t| counts[row * vocab + t as usize] += 1);
            }
            let mut by_counts = original.clone();
            let counted = History::Counts { prompt: &seen, output: &counts };
            apply_penalties(backend, by_counts.view_mut(), &penalties, counted).unwrap();
            assert_eq!(by_tokens.bits(), by_counts.bits(), "{dtype} {rows}x{vocab}");

            let rows_of = original.values();
            let exact = rows_of.chunks(vocab).enumerate();
            let expected: Vec<f64> =
                exact.flat_map(|(row, logits)| exactly(logits, &lists[row], &penalties[row])).collect();
            by_tokens.assert_close(&expected, |_| 32.0 * F32_UNIT, &format!("{dtype} {rows}x{vocab}"));
            let bits = original.bits();
            for (i, found) in by_tokens.bits().into_iter().enumerate() {
                let touched = seen[i] || counts[i] > 0;
                assert!(touched || found == bits[i], "token {i} does not occur");
            }
        }
    }
}

fn bias_adds_and_excludes<B: Backend>([backend]: &[B; 1]) {
    for dtype in DTYPES {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let mut logits =
            Array::new(dtype, &[2, 4], Layout::Padded, &[1.0, nan, inf, -2.0, 0.5, -inf, 3.0, 0.25]);
        let bias = |token, bias| Bias { token, bias };
        let first = [bias(0, 2.0), bias(1, -inf), bias(2, -inf), bias(0, 0.5)];
        let second = [bias(1, 100.0), bias(3, -inf), bias(3, 7.0)];
        apply_logit_bias(backend, logits.view_mut(), &[&first, &second]).unwrap();
        let inf = f64::INFINITY;
        assert_eq!(logits.values(), [3.5, -inf, -inf, -2.0, 0.5, -inf, 3.0, -inf], "{dtype}");
    }
}

fn draws_from_edited_logits_follow_the_definition<B: Backend>([backend]: &[B; 1]) {
    let values = random(45, 11);
    let wide: Vec<f64> = values.iter().map(|&v| f64::from(v)).collect();
    let edited = || Array::new(Dtype::F32, &[1, 45], Layout::Dense, &values);
    let params = SamplingParams { seed: 5, ..SamplingParams::default() };
    let narrow = |logits: &Array| logits.values().iter().map(|&v| v as f32).collect::<Vec<_>>();

    let mut logits = edited();
    apply_token_bitmask(
        backend,
        logits.view_mut(),
        TokenBitmask { words: (&words(1, 45)).into(), rows: None },
    )
    .unwrap();
    let selected: Vec<f64> =
        (0..45).map(|t| if allowed(0, t) { wide[t] } else { f64::NEG_INFINITY }).collect();
    assert_drawn_from(&softmax(&selected, 1.0), &draws(backend, &narrow(&logits), params), "bitmask");

    for penalties in PENALTIES {
        let mut logits = edited();
        let lists = history(9, 45);
        let tokens = History::Tokens { prompt: &[&lists.0], output: &[&lists.1] };
        apply_penalties(backend, logits.view_mut(), &[penalties], tokens).unwrap();
        let expected = softmax(&exactly(&wide, &lists, &penalties), 1.0);
        assert_drawn_from(&expected, &draws(backend, &narrow(&logits), params), &format!("{penalties:?}"));
    }
}

#[test]
fn refusals_name_argument_and_value() {
    let backend = &Cpu::with_threads(1).unwrap();
    let mut logits = Array::random(Dtype::F32, &[2, 33], Layout::Dense, 2);
    let before = logits.bits();
    let mut mask = |words: &[i32], rows| {
        text(apply_token_bitmask(backend, logits.view_mut(), TokenBitmask { words: words.into(), rows }))
    };
    assert_eq!(
        mask(&[0; 3], None),
        "sampling.apply_token_bitmask: bitmask has 3 words, expected rows x ceil(vocab / 32) = 2 x 2"
    );
    assert_eq!(
        mask(&[0; 4], Some(&[1, 2])),
        "sampling.apply_token_bitmask: rows[1] = 2 is not below rows = 2"
    );

    let mut bias = |lists: &[&[Bias]]| text(apply_logit_bias(backend, logits.view_mut(), lists));
    let of = |token, bias| [Bias { token, bias }];
    assert_eq!(bias(&[&[]]), "sampling.apply_logit_bias: bias has 1 lists, expected rows = 2");
    let refused = "sampling.apply_logit_bias: request 1:";
    assert_eq!(bias(&[&[], &of(33, 0.0)]), format!("{refused} token 33 is not below vocab = 33"));
    for number in [f32::NAN, f32::INFINITY] {
        let text = format!("{refused} bias {number} of token 3 is not finite or -inf");
        assert_eq!(bias(&[&of(1, 1.0), &of(3, number)]), text);
    }

    let good = Penalties::default();
    let none = History::Tokens { prompt: &[&[], &[]], output: &[&[], &[]] };
    let mut penalise = |penalties: &[Penalties], history| {
        text(apply_penalties(backend, logits.view_mut(), penalties, history))
            .split_once(": ")
            .map(|(operator, text)| (operator == "sampling.apply_penalties").then(|| text.to_owned()))
            .unwrap()
            .unwrap()
    };
    assert_eq!(penalise(&[good], none), "penalties has 1 elements, expected rows = 2");
    let cases = [
        (Penalties { repetition: 0.0, ..good }, "repetition = 0 is not a finite number > 0"),
        (Penalties { repetition: f32::NAN, ..good }, "repetition = NaN is not a finite number > 0"),
        (Penalties { repetition: f32::INFINITY, ..good }, "repetition = inf is not a finite number > 0"),
        (Penalties { presence: f32::NAN, ..good }, "presence = NaN is not finite"),
        (Penalties { frequency: -f32::INFINITY, ..good }, "frequency = -inf is not finite"),
    ];
    for (bad, text) in cases {
        assert_eq!(penalise(&[good, bad], none), format!("request 1: {text}"));
    }
    let prompt = History::Tokens { prompt: &[&[], &[5, 33]], output: &[&[], &[]] };
    assert_eq!(penalise(&[good; 2], prompt), "request 1: prompt[1] = 33 is not below vocab = 33");
    let output = History::Tokens { prompt: &[&[], &[]], output: &[&[u32::MAX], &[]] };
    assert_eq!(penalise(&[good; 2], output), "request 0: output[0] = 4294967295 is not below vocab = 33");
    let short = History::Tokens { prompt: &[&[]], output: &[&[], &[]] };
    assert_eq!(penalise(&[good; 2], short), "prompt has 1 lists, expected rows = 2");
    let counts = History::Counts { prompt: &[false; 66], output: &[0; 65] };
    assert_eq!(penalise(&[good; 2], counts), "output has 65 elements, expected rows x vocab = 2 x 33");
    assert_eq!(logits.bits(), before, "a refused call changes nothing");
}
