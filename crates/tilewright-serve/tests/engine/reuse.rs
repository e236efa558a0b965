//! A request that reads pages which others filled says the same as one that fills them itself.

use crate::session::{Case, FIXTURES, Setup, case, draws, prompt};

fn reusing(model: &'static str) -> Setup {
    Setup::new(model).with(|options| options.prefix_reuse = true)
}

/// Runs `cases` one after another, each checked against itself without reuse, and gives the reused tokens of each.
fn one_after_another(model: &'static str, cases: &[Case]) -> Vec<usize> {
    let mut session = reusing(model).start();
    let mut reused = Vec::new();
    let mut before = 0;
    for (case, expected) in cases.iter().zip(Setup::new(model).alone(cases)) {
        assert_eq!(session.run(std::slice::from_ref(case)), [expected], "{model}");
        reused.push(session.report().reused_tokens - before);
        before = session.report().reused_tokens;
    }
    reused
}

#[test]
fn an_identical_request_after_the_first_reuses_all_whole_pages_but_keeps_one_token_to_compute() {
    for model in FIXTURES {
        // 48 tokens fill three pages; the last is computed anew, for its logits
        let reused = one_after_another(model, &[case(1, 48, 44), case(1, 48, 44)]);
        assert_eq!(reused, [0, 32], "{model}");
        let reused = one_after_another(model, &[case(1, 49, 44), case(1, 49, 44)]);
        assert_eq!(reused, [0, 48], "{model}");
    }
}

#[test]
fn a_prefix_that_ends_inside_a_page_is_reused_up_to_that_page() {
    for model in FIXTURES {
        let (first, mut second) = (case(1, 60, 44), case(2, 60, 44));
        second.prompt[..40].copy_from_slice(&first.prompt[..40]);
        assert_eq!(one_after_another(model, &[first, second]), [0, 32], "{model}");
    }
}

#[test]
fn a_longer_and_a_shorter_prompt_reuse_what_they_share() {
    for model in FIXTURES {
        let [short, middle, long] =
            [20, 40, 80].map(|len| Case { prompt: prompt(1, len), options: draws(3, 44) });
        let reused = one_after_another(model, &[middle.clone(), long, short, middle]);
        assert_eq!(reused, [0, 32, 16, 32], "{model}");
    }
}

#[test]
fn generated_tokens_are_reused_like_a_prompt() {
    for model in FIXTURES {
        let first = case(1, 37, 44);
        let said = Setup::new(model).alone(std::slice::from_ref(&first)).remove(0).tokens;
        let prompt = [&first.prompt[..], &said, &prompt(9, 5)].concat();
        let next = Case { prompt, options: draws(2, 44) };
        // 37 + 44 tokens, of which the last was drawn but never computed
        assert_eq!(one_after_another(model, &[first, next]), [0, 80], "{model}");
    }
}

#[test]
fn a_request_that_comes_while_another_with_its_prefix_runs_says_the_same() {
    for model in FIXTURES {
        let (first, mut second) = (case(1, 60, 44), case(2, 70, 44));
        second.prompt[..50].copy_from_slice(&first.prompt[..50]);
        let cases = [first.clone(), second, first];
        let expected = Setup::new(model).alone(&cases);
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
                let outcomes = ids.map(|id| session.take(id));
                assert_eq!(outcomes[..], expected, "{model}: {max_step_tokens} a step, {pause} steps apart");
                if pause == 20 {
                    assert_eq!(session.report().reused_tokens, 48 + 48, "{model}");
                }
            }
        }
    }
}

#[test]
fn requests_with_one_prompt_in_one_step_fill_pages_twice_and_keep_them_once() {
    for model in FIXTURES {
        let cases = [1, 2, 3].map(|seed| Case { prompt: prompt(1, 64), options: draws(seed, 44) });
        let mut session = reusing(model).start();
        let ids = cases.each_ref().map(|case| session.submit(case));
        session.step();
        // each of the three fills four pages; then all read the four of the first, and begin a page of their own
        let free = session.engine.available_pages();
        assert_eq!(512 - free, 4, "{model}");
        session.finish();
        assert_eq!(ids.map(|id| session.take(id))[..], Setup::new(model).alone(&cases), "{model}");
    }
}

#[test]
fn evicted_prefixes_are_computed_again() {
    for model in FIXTURES {
        // a pool that keeps one of these requests, not two
        let setup = reusing(model).with(|options| options.num_pages = 8);
        let mut session = setup.start();
        let (first, second) = (case(1, 60, 44), case(2, 60, 44));
        let expected = Setup::new(model).alone(&[first.clone(), second.clone()]);
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
