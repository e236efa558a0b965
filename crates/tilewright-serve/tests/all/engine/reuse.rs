//! Prefix reuse: a request with cached pages has the same output as one that computes them.

use super::session::{Case, Setup, case, draws, prompt};
use crate::fixtures::FIXTURES;

fn reusing(model: &'static str) -> Setup {
    Setup::new(model).with(|options| options.prefix_reuse = true)
}

/// Runs `cases` one after another, compares each with a run without reuse, and returns the reused tokens of each.
fn run_in_sequence(model: &'static str, cases: &[Case]) -> Vec<usize> {
    let mut session = reusing(model).start();
    let mut reused = Vec::new();
    let mut before = 0;
    for (case, expected) in cases.iter().zip(Setup::new(model).run_separately(cases)) {
        assert_eq!(session.run(std::slice::from_ref(case)), [expected], "{model}");
        reused.push(session.report().reused_tokens - before);
        before = session.report().reused_tokens;
    }
    reused
}

#[test]
fn an_identical_request_reuses_all_full_pages_and_computes_at_least_one_token() {
    for model in FIXTURES {
        // 48 tokens fill three pages; the last page is computed again, for the logits
        let reused = run_in_sequence(model, &[case(1, 48, 44), case(1, 48, 44)]);
        assert_eq!(reused, [0, 32], "{model}");
        let reused = run_in_sequence(model, &[case(1, 49, 44), case(1, 49, 44)]);
        assert_eq!(reused, [0, 48], "{model}");
    }
}

#[test]
fn a_prefix_that_ends_inside_a_page_is_reused_up_to_that_page() {
    for model in FIXTURES {
        let (first, mut second) = (case(1, 60, 44), case(2, 60, 44));
        second.prompt[..40].copy_from_slice(&first.prompt[..40]);
        assert_eq!(run_in_sequence(model, &[first, second]), [0, 32], "{model}");
    }
}

#[test]
fn a_longer_and_a_shorter_prompt_reuse_what_they_share() {
    for model in FIXTURES {
        let [short, middle, long] =
            [20, 40, 80].map(|len| Case { prompt: prompt(1, len), options: draws(3, 44) });
        let reused = run_in_sequence(model, &[middle.clone(), long, short, middle]);
        assert_eq!(reused, [0, 32, 16, 32], "{model}");
    }
}

#[test]
fn generated_tokens_are_reused_like_a_prompt() {
    for model in FIXTURES {
        let first = case(1, 37, 44);
        let generated = Setup::new(model).run_separately(std::slice::from_ref(&first)).remove(0).tokens;
        let prompt = [&first.prompt[..], &generated, &prompt(9, 5)].concat();
        let next = Case { prompt, options: draws(2, 44) };
        // 37 + 44 tokens; the last one was sampled but never computed
        assert_eq!(run_in_sequence(model, &[first, next]), [0, 80], "{model}");
    }
}

#[test]
fn a_request_submitted_while_another_with_its_prefix_runs_has_the_same_output() {
    for model in FIXTURES {
        let (first, mut second) = (case(1, 60, 44), case(2, 70, 44));
        second.prompt[..50].copy_from_slice(&first.prompt[..50]);
        let cases = [first.clone(), second, first];
        let expected = Setup::new(model).run_separately(&cases);
        for max_step_tokens in [512, 13] {
            for pause in [0, 1, 3, 20] {
                let setup = reusing(model).with(|options| options.max_step_tokens = max_step_tokens);
                let mut session = setup.start();
                let ids = cases.each_ref().map(|case| {
                    let id = session.submit(case);
                    (0..pause).for_each(|_| session.step());
                    id
                });
                session.finish();
                let outcomes = ids.map(|id| session.take_outcome(id));
                assert_eq!(
                    outcomes[..],
                    expected,
                    "{model}: {max_step_tokens} per step, {pause} steps apart"
                );
                if pause == 20 {
                    assert_eq!(session.report().reused_tokens, 48 + 48, "{model}");
                }
            }
        }
    }
}

#[test]
fn equal_prompts_in_one_step_are_deduplicated() {
    for model in FIXTURES {
        let cases = [1, 2, 3].map(|seed| Case { prompt: prompt(1, 64), options: draws(seed, 44) });
        let mut session = reusing(model).start();
        let ids = cases.each_ref().map(|case| session.submit(case));
        session.step();
        // each of the three fills four pages; then all share the first four and start their own page
        let free = session.engine.available_pages();
        assert_eq!(512 - free, 4, "{model}");
        session.finish();
        assert_eq!(
            ids.map(|id| session.take_outcome(id))[..],
            Setup::new(model).run_separately(&cases),
            "{model}"
        );
    }
}

#[test]
fn evicted_prefixes_are_computed_again() {
    for model in FIXTURES {
        // the pool has capacity for one of these requests, not two
        let setup = reusing(model).with(|options| options.num_pages = 8);
        let mut session = setup.start();
        let (first, second) = (case(1, 60, 44), case(2, 60, 44));
        let expected = Setup::new(model).run_separately(&[first.clone(), second.clone()]);
        for round in 0..3 {
            assert_eq!(session.run(std::slice::from_ref(&first)), expected[..1], "{model}, round {round}");
            assert_eq!(session.run(std::slice::from_ref(&second)), expected[1..], "{model}, round {round}");
        }
        let report = session.report();
        assert_eq!((report.preemptions, report.peak_pages), (0, 8), "{model}");
    }
}

#[test]
fn without_reuse_nothing_is_kept() {
    let mut session = Setup::new("llama").start();
    session.run(&[case(1, 60, 44), case(1, 60, 44)]);
    session.run(&[case(1, 60, 44)]);
    assert_eq!((session.report().reused_tokens, session.report().reused_pages), (0, 0));
    assert_eq!(session.report().prefill_tokens, 180);
}
