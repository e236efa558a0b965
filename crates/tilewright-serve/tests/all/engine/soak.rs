//! Soak test: hundreds of random requests in small random pools, submitted at random times.
//!
//! Checked: page integrity after every step, every request ends, and each output equals that of a separate run.

use super::session::{Case, Outcome, Session, Setup, draws, prompt};
use crate::generator::Generator;
use std::collections::BTreeMap;
use tilewright_serve::RequestId;

const ROUNDS: usize = 16;
const REQUESTS: usize = 32;
/// The longest prompt and the longest continuation.
const LONGEST: usize = 40 + 30;

/// The parameters of a request; equal requests share one separate run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    stem: u64,
    /// Tokens of the shared stem; the tail follows.
    stem_len: usize,
    tail_len: usize,
    max_tokens: usize,
    seed: u64,
    stops: bool,
}

impl Key {
    fn random(random: &mut Generator) -> Self {
        Self {
            stem: 1 + random.below(3) as u64,
            stem_len: [0, 3, 16, 25, 32][random.below(5)],
            tail_len: [1, 2, 8][random.below(3)],
            max_tokens: [1, 7, 30][random.below(3)],
            seed: random.below(4) as u64,
            stops: random.below(4) == 0,
        }
    }

    fn case(&self) -> Case {
        let stem = &prompt(self.stem, 40)[..self.stem_len];
        let mut options = draws(self.seed, self.max_tokens);
        // an eighth of the vocabulary: most continuations sample one of them
        options.stop = if self.stops { (40..76).collect() } else { Vec::new() };
        Case { prompt: [stem, &prompt(100 + self.tail_len as u64, self.tail_len)].concat(), options }
    }
}

/// Cached outcomes of separate runs.
struct SeparateRuns {
    setup: Setup,
    known: BTreeMap<Key, Outcome>,
}

impl SeparateRuns {
    fn outcome(&mut self, key: Key) -> &Outcome {
        let setup = self.setup;
        self.known.entry(key).or_insert_with(|| setup.run_separately(&[key.case()]).remove(0))
    }
}

/// A pool with little more capacity than the longest request, with random options.
fn random_setup(model: &'static str, random: &mut Generator) -> Setup {
    let page_size = [1, 3, 4, 16][random.below(4)];
    let tokens = LONGEST + 1 + random.below(LONGEST);
    let max_step_tokens = [1, 5, 16, 40, 512][random.below(5)];
    let max_requests = [1, 3, 8, 64][random.below(4)];
    let prefix_reuse = random.below(4) > 0;
    let setup = Setup { threads: 1 + random.below(2), ..Setup::new(model) };
    setup.with(|options| {
        (options.page_size, options.num_pages) = (page_size, tokens.div_ceil(page_size));
        (options.max_step_tokens, options.max_requests) = (max_step_tokens, max_requests);
        options.prefix_reuse = prefix_reuse;
    })
}

fn submit(session: &mut Session, random: &mut Generator, waiting: &mut Vec<(RequestId, Key)>) -> usize {
    let key = Key::random(random);
    // sometimes several continuations with different seeds
    let count = if random.below(4) == 0 { 2 + random.below(4) } else { 1 };
    let keys: Vec<_> = (0..count as u64).map(|i| Key { seed: (key.seed + i) % 4, ..key }).collect();
    let options: Vec<_> = keys.iter().map(|key| key.case().options).collect();
    waiting.extend(session.submit_all(&key.case().prompt, &options).into_iter().zip(keys));
    count
}

#[test]
fn random_requests_in_small_pools_equal_separate_runs() {
    let mut preemptions = 0;
    for (seed, model) in [(1, "llama"), (2, "qwen2"), (3, "qwen3")] {
        let mut random = Generator::new(seed);
        let mut separate = SeparateRuns { setup: Setup::new(model), known: BTreeMap::new() };
        for round in 0..ROUNDS {
            let setup = random_setup(model, &mut random);
            let mut session = setup.start();
            let mut waiting = Vec::new();
            let mut submitted = 0;
            while submitted < REQUESTS {
                submitted += submit(&mut session, &mut random, &mut waiting);
                (0..random.below(6)).for_each(|_| session.step());
            }
            session.finish();
            for (id, key) in waiting {
                assert_eq!(
                    &session.take_outcome(id),
                    separate.outcome(key),
                    "round {round} of {model}: {key:?}, {setup:?}"
                );
            }
            preemptions += session.report().preemptions;
        }
    }
    assert!(preemptions > 100, "{preemptions} preemptions: the pools are too large to be a test");
}
