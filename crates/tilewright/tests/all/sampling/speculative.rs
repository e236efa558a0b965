//! Chain speculative sampling against the oracle with the same random numbers, per slot, and its errors.
//! `speculative_distribution.rs` tests the distributions.

use crate::arrays::random;
use tilewright::{
    Backend, Cpu, Error, Result, SamplingParams, View,
    reference::sampling::{Filters, chain, filtered, softmax},
    sampling::{ChainCounts, ChainOutput, Drafts, Scores, chain_speculative_sampling, rng::speculative_pair},
};

crate::judge_backends!(
    chains_match_the_oracle,
    shorter_drafts_end_with_minus_1_and_the_rest_is_not_read,
    logits_are_tempered_and_filtered_at_every_position,
    bad_rows_report_errors_and_other_totals_grow
);

/// Probabilities of `rows` rows, with every third token impossible in some of them, or one-hot rows.
fn probs(rows: usize, vocab: usize, one_hot: bool, seed: u64) -> Vec<f32> {
    let values = random(rows * vocab, seed);
    let row = |row: usize| {
        let logits = values[row * vocab..][..vocab].iter().enumerate();
        let certain = (row * 31 + seed as usize) % vocab;
        let weight = |(t, &x): (usize, &f32)| match one_hot {
            true => f64::from(t == certain),
            false if row % 2 == 1 && t % 3 == 0 => 0.0,
            false => f64::from(x).exp(),
        };
        let weights: Vec<f64> = logits.map(weight).collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(move |w| (w / sum) as f32)
    };
    (0..rows).flat_map(row).collect()
}

struct ChainCase {
    batch: usize,
    n: usize,
    vocab: usize,
    draft: Vec<f32>,
    ids: Vec<i32>,
    target: Vec<f32>,
    params: Vec<SamplingParams>,
}

impl ChainCase {
    fn new((batch, n, vocab): (usize, usize, usize), one_hot: bool) -> Self {
        let draft = probs(batch * n, vocab, false, 1);
        let target = probs(batch * (n + 1), vocab, one_hot, 2);
        // drafted tokens are mostly likely ones
        let best = |row: &[f32]| (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as i32;
        let id = |(i, row): (usize, &[f32])| match (i % 3, one_hot) {
            (0, _) => (i * 13 % vocab) as i32,
            (_, true) => best(&target[(i + i / n) * vocab..][..vocab]),
            _ => best(row),
        };
        let ids = draft.chunks(vocab).enumerate().map(id).collect();
        let params = |row: usize| SamplingParams {
            seed: row as u64 * 1001,
            offset: 5 * row as u64,
            ..SamplingParams::default()
        };
        Self { batch, n, vocab, draft, ids, target, params: (0..batch).map(params).collect() }
    }

    fn run<B: Backend>(&self, backend: &B, logits: bool) -> (Vec<i32>, Vec<Result<ChainCounts>>) {
        let drafts = Drafts {
            probs: View::new(&self.draft, &[self.batch, self.n, self.vocab]).unwrap(),
            ids: &self.ids,
        };
        let target = View::new(&self.target, &[self.batch, self.n + 1, self.vocab]).unwrap();
        let target = if logits { Scores::Logits(target) } else { Scores::Probs(target) };
        let mut tokens = vec![77; self.batch * (self.n + 1)];
        let mut chains = vec![Err(Error::new("test", "not written")); self.batch];
        let out = ChainOutput { tokens: &mut tokens, chains: &mut chains, totals: None };
        chain_speculative_sampling(backend, drafts, target, &self.params, out).unwrap();
        (tokens, chains)
    }

    /// Compares with the oracle's chains for f64 targets.
    fn assert_matches(&self, found: &(Vec<i32>, Vec<Result<ChainCounts>>), target: &[Vec<f64>]) {
        let wide: Vec<f64> = self.draft.iter().map(|&p| f64::from(p)).collect();
        let draft: Vec<_> = wide.chunks(self.vocab).collect();
        for row in 0..self.batch {
            let ids = &self.ids[row * self.n..][..self.n];
            let drafts: Vec<_> = ids
                .iter()
                .take_while(|&&id| id != -1)
                .enumerate()
                .map(|(i, &id)| (draft[row * self.n + i], id as usize))
                .collect();
            let targets: Vec<_> = target[row * (self.n + 1)..].iter().map(Vec::as_slice).collect();
            let SamplingParams { seed, offset, .. } = self.params[row];
            let pair = |i: usize| speculative_pair(seed, offset + i as u64);
            let mut expected: Vec<_> =
                chain(&drafts, &targets, pair).into_iter().map(|token| token as i32).collect();
            let counts = found.1[row].as_ref().unwrap();
            assert_eq!(counts.emitted as usize, expected.len() - 1, "request {row}");
            let share = |probs: &[f64], t: usize| probs[t] / probs.iter().sum::<f64>();
            let passes = drafts
                .iter()
                .enumerate()
                .filter(|&(i, &(p, t))| pair(i)[0] * share(p, t) < share(targets[i], t));
            assert_eq!(counts.accepted as usize, passes.count(), "request {row}");
            expected.resize(self.n + 1, -1);
            assert_eq!(found.0[row * (self.n + 1)..][..self.n + 1], expected, "request {row}");
        }
    }

    fn exact_target(&self) -> Vec<Vec<f64>> {
        let wide: Vec<f64> = self.target.iter().map(|&p| f64::from(p)).collect();
        wide.chunks(self.vocab).map(<[f64]>::to_vec).collect()
    }
}

fn chains_match_the_oracle<B: Backend>([backend]: &[B; 1]) {
    let batches = if crate::judge::stride() > 1 { [0, 1, 2, 9] } else { [0, 1, 99, 989] };
    for batch in batches {
        for n in [0, 1, 3, 5, 7] {
            for one_hot in [false, true] {
                let case = ChainCase::new((batch, n, 111), one_hot);
                case.assert_matches(&case.run(backend, false), &case.exact_target());
            }
        }
    }
    let large = ChainCase::new(if crate::judge::stride() > 1 { (1, 1, 5001) } else { (3, 2, 32_001) }, false);
    large.assert_matches(&large.run(backend, false), &large.exact_target());
}

fn shorter_drafts_end_with_minus_1_and_the_rest_is_not_read<B: Backend>([backend]: &[B; 1]) {
    let mut case = ChainCase::new((40, 5, 37), false);
    let exact = case.exact_target();
    for row in 0..40 {
        let len = row % 6;
        case.ids[row * 5 + len..(row + 1) * 5].fill(-1);
        case.draft[(row * 5 + len) * 37..(row + 1) * 5 * 37].fill(f32::NAN);
        case.target[(row * 6 + len + 1) * 37..(row + 1) * 6 * 37].fill(f32::NAN);
    }
    let found = case.run(backend, false);
    for row in 0..40 {
        // unread rows are restored for the oracle
        let len = row % 6;
        case.draft[(row * 5 + len) * 37..(row + 1) * 5 * 37].fill(1.0);
    }
    case.assert_matches(&found, &exact);
}

fn logits_are_tempered_and_filtered_at_every_position<B: Backend>([backend]: &[B; 1]) {
    let mut case = ChainCase::new((60, 3, 50), false);
    case.target = random(60 * 4 * 50, 9);
    for (row, params) in case.params.iter_mut().enumerate() {
        params.temperature = [1.0, 0.6, 0.0][row % 3];
        params.top_k = [None, Some(5)][row % 2];
    }
    let exact = case.exact_target();
    let filter = |(i, logits): (usize, &Vec<f64>)| {
        let SamplingParams { temperature, top_k, .. } = case.params[i / 4];
        let filters = Filters { top_k: top_k.map(|k| k as usize), ..Filters::default() };
        filtered(&softmax(logits, f64::from(temperature)), &filters)
    };
    let target: Vec<_> = exact.iter().enumerate().map(filter).collect();
    case.assert_matches(&case.run(backend, true), &target);
}

#[test]
fn chains_are_batch_and_thread_invariant() {
    let case = ChainCase::new((30, 4, 300), false);
    let (tokens, chains) = case.run(&Cpu::with_threads(4).unwrap(), false);
    assert_eq!((tokens.clone(), chains.clone()), case.run(&Cpu::with_threads(1).unwrap(), false));
    for row in 0..30 {
        let alone = ChainCase {
            batch: 1,
            draft: case.draft[row * 4 * 300..][..4 * 300].to_vec(),
            ids: case.ids[row * 4..][..4].to_vec(),
            target: case.target[row * 5 * 300..][..5 * 300].to_vec(),
            params: vec![case.params[row]],
            ..case
        };
        let found = alone.run(&Cpu::with_threads(1).unwrap(), false);
        assert_eq!(found, (tokens[row * 5..][..5].to_vec(), vec![chains[row].clone()]));
    }
}

fn bad_rows_report_errors_and_other_totals_grow<B: Backend>([backend]: &[B; 1]) {
    let mut case = ChainCase::new((6, 2, 4), false);
    case.draft[2 * 4 + 1] = f32::NAN;
    case.target[(2 * 3 + 1) * 4 + 3] = -0.5;
    case.target[(3 * 3 + 2) * 4..][..4].fill(0.0);
    case.draft[(4 * 2 + 1) * 4] = f32::INFINITY;
    let drafts = Drafts { probs: View::new(&case.draft, &[6, 2, 4]).unwrap(), ids: &case.ids };
    let target = Scores::Probs(View::new(&case.target, &[6, 3, 4]).unwrap());
    let mut totals = vec![ChainCounts { accepted: 10, emitted: 20 }; 6];
    let (mut tokens, mut chains) = (vec![77; 18], vec![Ok(ChainCounts::default()); 6]);
    for _ in 0..2 {
        let out = ChainOutput { tokens: &mut tokens, chains: &mut chains, totals: Some(&mut totals) };
        chain_speculative_sampling(backend, drafts, target, &case.params, out).unwrap();
    }
    let bad = [
        (1, "draft at position 0: probabilities hold NaN at token 1"),
        (2, "target at position 1: probabilities hold -0.5 at token 3"),
        (3, "target at position 2: every probability is 0"),
        (4, "draft at position 1: probabilities hold inf at token 0"),
    ];
    for (row, why) in bad {
        let text = chains[row].as_ref().unwrap_err().to_string();
        assert_eq!(text, format!("sampling.chain_speculative_sampling: request {row}: {why}"));
        assert_eq!(tokens[row * 3..][..3], [-1; 3]);
        assert_eq!(totals[row], ChainCounts { accepted: 10, emitted: 20 });
    }
    for row in [0, 5] {
        let counts = *chains[row].as_ref().unwrap();
        let sum = ChainCounts { accepted: 10 + 2 * counts.accepted, emitted: 20 + 2 * counts.emitted };
        assert_eq!(totals[row], sum);
        assert!(tokens[row * 3] >= 0);
    }
    assert!(totals[0].emitted + totals[5].emitted > 40, "some drafts are kept");
}

#[test]
fn refusals_name_argument_and_value() {
    let good = ChainCase::new((3, 2, 4), false);
    let params = SamplingParams::default();
    let refuse = |ids: &[i32], shapes: [&[usize]; 2], params: &[SamplingParams], lens: [usize; 3]| {
        let probs = |shape: &[usize]| vec![0.5f32; shape.iter().product()];
        let (draft, target) = (probs(shapes[0]), probs(shapes[1]));
        let drafts = Drafts { probs: View::new(&draft, shapes[0]).unwrap(), ids };
        let target = Scores::Probs(View::new(&target, shapes[1]).unwrap());
        let (mut tokens, mut chains) = (vec![77; lens[0]], vec![Ok(ChainCounts::default()); lens[1]]);
        let mut totals = vec![ChainCounts::default(); lens[2]];
        let out = ChainOutput { tokens: &mut tokens, chains: &mut chains, totals: Some(&mut totals) };
        let result = chain_speculative_sampling(&Cpu::with_threads(1).unwrap(), drafts, target, params, out);
        assert!(tokens.iter().all(|&token| token == 77), "a refused call writes nothing");
        let text = result.unwrap_err().to_string();
        text.strip_prefix("sampling.chain_speculative_sampling: ").unwrap().to_owned()
    };
    let shapes: [&[usize]; 2] = [&[3, 2, 4], &[3, 3, 4]];
    let ids = |ids: &[i32]| refuse(ids, shapes, &[params; 3], [9, 3, 3]);
    assert_eq!(ids(&[0, 1, 2, 4, 0, 0]), "request 1: ids[1] = 4 is neither in 0..4 nor -1");
    assert_eq!(ids(&[0, 1, 2, 3, -2, 0]), "request 2: ids[0] = -2 is neither in 0..4 nor -1");
    assert_eq!(ids(&[0, 1, -1, 3, 0, 0]), "request 1: ids[1] = 3 follows a -1, which ends a draft");
    assert_eq!(ids(&[0; 5]), "draft ids has 5 elements, expected batch x n = 3 x 2");

    let shape =
        |draft: &[usize], target: &[usize]| refuse(&good.ids, [draft, target], &[params; 3], [9, 3, 3]);
    let expected = "expected [batch, n, vocab] = [3, 2, 4]";
    assert_eq!(shape(&[3, 3, 4], shapes[1]), format!("draft probs has shape [3, 3, 4], {expected}"));
    assert_eq!(shape(&[3, 2, 5], shapes[1]), format!("draft probs has shape [3, 2, 5], {expected}"));
    let expected = "expected [batch, n + 1, vocab] with vocab in 1..=2147483647";
    assert_eq!(shape(shapes[0], &[3, 0, 4]), format!("target probs has shape [3, 0, 4], {expected}"));
    assert_eq!(shape(shapes[0], &[3, 4]), format!("target probs has shape [3, 4], {expected}"));

    let rest = |params: &[SamplingParams], lens| refuse(&good.ids, shapes, params, lens);
    assert_eq!(rest(&[params; 2], [9, 3, 3]), "params has 2 elements, expected rows = 3");
    let warm = SamplingParams { temperature: 0.5, ..params };
    assert_eq!(
        rest(&[params, warm, params], [9, 3, 3]),
        "request 1: temperature = 0.5 applies to logits, expected 1 for probabilities"
    );
    assert_eq!(rest(&[params; 3], [8, 3, 3]), "out.tokens has 8 elements, expected batch x (n + 1) = 9");
    assert_eq!(rest(&[params; 3], [9, 2, 3]), "out.chains has 2 elements, expected batch = 3");
    assert_eq!(rest(&[params; 3], [9, 3, 4]), "out.totals has 4 elements, expected batch = 3");
}
