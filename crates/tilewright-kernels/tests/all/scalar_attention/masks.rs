//! Windows, packed bits, blocks and shared prefixes, against the oracle.

use super::{
    generator::Generator,
    judge::Expected,
    run::Case,
    sample::{Lens, Sample},
    schedule::{Cut, Segment, pack_bits},
    shapes::{CUTS, plain},
    storage::{Storage, Stored},
};
use tilewright::{
    Dtype, HeadDim, Heads, Mask, Problem,
    attention::variant::{Alibi, Both, ExpressionVariant, PrefixLm, RotaryEmbedding},
    reference::{
        attention::{Definition, LogitIndex},
        rope::frequency,
        variant as formula,
    },
    rope::Rope,
};

const LENS: [Lens; 4] = [(1, 150), (70, 90), (3, 0), (9, 4)];
const STORAGES: [Storage; 3] = [Storage::Paged(5), Storage::Ragged, Storage::Paged(64)];

fn problem(heads: (usize, usize), mask: Mask) -> Problem {
    let builder = Problem::builder(Heads { qo: heads.0, kv: heads.1 }, HeadDim { qk: 24, vo: 16 });
    builder.dtypes(Dtype::F32, Dtype::F16).mask(mask).build().expect("it is sound")
}

#[test]
fn windows() {
    let rights = [Some(0), Some(3), None];
    let windows = [0, 5, 63, 64, u32::MAX].into_iter().flat_map(|left| rights.map(|right| (left, right)));
    let variant = plain();
    for (number, (left, right)) in windows.enumerate() {
        let sample = Sample::random(problem((2, 1), Mask::Window { left, right }), &LENS, number as u64);
        let storage = STORAGES[number % 3];
        let stored = Stored::new(&sample, storage, 1);
        let case = Case::new((&sample, &stored, storage), &variant, CUTS[number % 3]);
        Expected::of(&sample)
            .check(&case.run())
            .unwrap_or_else(|why| panic!("{}, {:?}: {why}", sample.problem, case.cut));
    }
}

#[test]
fn packed_bits_of_all_keys_and_of_the_last() {
    let variant = plain();
    for (number, density) in [3, 50, 90, 0].into_iter().enumerate() {
        let mask = [Mask::Full, Mask::Causal, Mask::Window { left: 20, right: Some(7) }][number % 3];
        let sample = Sample::random(problem((4, 2), mask), &LENS, number as u64);
        let storage = STORAGES[number % 3];
        let stored = Stored::new(&sample, storage, 1);
        // all keys, or half of them plus one
        let columns = LENS.map(|(_, keys)| if number % 2 == 0 { keys } else { keys.div_ceil(2) });
        let mut generator = Generator::new(number as u64);
        let shown: Vec<Vec<bool>> = LENS
            .iter()
            .zip(columns)
            .map(|(lens, columns)| (0..lens.0 * columns).map(|_| generator.below(100) < density).collect())
            .collect();
        let (mask_bits, first) = pack_bits(&shown);
        let mut case =
            Case { mask_bits, ..Case::new((&sample, &stored, storage), &variant, CUTS[number % 3]) };
        let of_request =
            |(r, segment): (usize, Segment)| Segment { mask: Some((first[r], columns[r])), ..segment };
        case.segments = Some(case.requests().1.into_iter().enumerate().map(of_request).collect());
        let expected = Expected::by(&sample, &|r| {
            let (shown, columns, free) = (&shown[r], columns[r], LENS[r].1 - columns[r]);
            let visible = move |at: LogitIndex| at.j < free || shown[at.i * columns + at.j - free];
            Definition { visible: Box::new(visible), ..Definition::default() }
        });
        expected.check(&case.run()).unwrap_or_else(|why| panic!("density {density}, {mask}: {why}"));
    }
}

#[test]
fn blocks_at_their_positions() {
    let (rows, keys, block) = (40, 200, 8);
    let variant = plain();
    for (number, mask) in
        [Mask::Full, Mask::Causal, Mask::Window { left: 60, right: Some(2) }].into_iter().enumerate()
    {
        let sample = Sample::random(problem((4, 2), mask), &[(rows, keys)], number as u64);
        let stored = Stored::new(&sample, Storage::Ragged, 1);
        let mut generator = Generator::new(number as u64);
        // blocks of 10 rows, different per head
        let has: Vec<Vec<bool>> =
            (0..8).map(|_| (0..keys / block).map(|_| generator.below(3) == 0).collect()).collect();
        let (mut indices, mut segments) = (Vec::new(), Vec::new());
        for (at, has) in has.iter().enumerate() {
            let blocks: Vec<u32> =
                (0..has.len()).filter(|block| has[*block]).map(|block| block as u32).collect();
            segments.push(Segment {
                qo: at / 2 * 10..at / 2 * 10 + 10,
                kv_heads: at % 2..at % 2 + 1,
                kv_start: indices.len(),
                kv_len: blocks.len() * block,
                base: usize::MAX >> 40,
                request: Some(0),
                shared: false,
                mask: None,
            });
            indices.extend(blocks);
        }
        let case = Case {
            segments: Some(segments),
            blocks: Some((block, indices)),
            ..Case::new((&sample, &stored, Storage::Ragged), &variant, CUTS[number])
        };
        let expected = Expected::by(&sample, &|_| {
            let visible = |at: LogitIndex| has[at.i / 10 * 2 + at.g][at.j / block];
            Definition { visible: Box::new(visible), ..Definition::default() }
        });
        expected.check(&case.run()).unwrap_or_else(|why| panic!("{mask}: {why}"));
    }
}

/// Requests with a shared prefix of 64 tokens: one segment for the prefix and one per request.
fn levels(variant: &ExpressionVariant, definition: impl Fn(usize) -> Definition<'static>, mask: Mask) {
    const SHARED: usize = 64;
    let lens = [(2, 70), (0, 64), (1, 64), (5, 200)];
    let mut sample = Sample::random(problem((6, 2), mask), &lens, 5);
    let (of_k, of_v) = (SHARED * 2 * 24, SHARED * 2 * 16);
    let (first_k, first_v) = (sample.k[0].clone(), sample.v[0].clone());
    for r in 1..lens.len() {
        sample.k[r][..of_k].copy_from_slice(&first_k[..of_k]);
        sample.v[r][..of_v].copy_from_slice(&first_v[..of_v]);
    }
    for (storage, cut) in
        [(Storage::Paged(16), CUTS[0]), (Storage::Ragged, CUTS[1]), (Storage::Paged(64), CUTS[2])]
    {
        let stored = Stored::new(&sample, storage, 1);
        let mut case = Case::new((&sample, &stored, storage), variant, cut);
        let own = case.requests().1;
        let shared = Segment { qo: 0..8, kv_len: SHARED, request: None, shared: true, ..own[0].clone() };
        let entries = SHARED / stored.page_size();
        let behind = |segment: Segment| Segment {
            kv_start: segment.kv_start + entries,
            kv_len: segment.kv_len - SHARED,
            base: SHARED,
            shared: true,
            ..segment
        };
        case.segments = Some(std::iter::once(shared).chain(own.into_iter().map(behind)).collect());
        let expected = Expected::by(&sample, &definition);
        expected.check(&case.run()).unwrap_or_else(|why| panic!("{mask}, {storage:?}, {cut:?}: {why}"));
    }
}

#[test]
fn shared_prefixes() {
    for mask in [Mask::Causal, Mask::Full, Mask::Window { left: 30, right: Some(0) }] {
        levels(&plain(), |_| Definition::default(), mask);
    }
}

#[test]
fn hooks_get_requests_and_positions_in_cascades() {
    let rope = RotaryEmbedding::new(&Rope::new(24, 1e4).expect("it is sound")).expect("it is sound");
    let prefixes = PrefixLm::new(&[3, 64, 9, 120]).expect("they are small");
    let variant = Both::new(rope, Both::new(Alibi::new(6), prefixes));
    let variant = ExpressionVariant::of(&variant).expect("it can be recorded");
    let definition = |r: usize| {
        let frequencies: &'static [f64] =
            (0..12).map(|pair| frequency(pair, 24, 1e4)).collect::<Vec<_>>().leak();
        let slopes: &'static [f64] = formula::alibi_slopes(6).leak();
        let visible = formula::prefix_lm([3, 64, 9, 120][r]).visible;
        Definition { logit: formula::alibi(slopes).logit, visible, ..formula::rotary_embedding(frequencies) }
    };
    levels(&variant, definition, Mask::Full);
}

#[test]
fn masked_keys_change_no_bit() {
    let variant = plain();
    let sample = Sample::random(problem((4, 2), Mask::Window { left: 100, right: Some(0) }), &[(9, 150)], 2);
    let hidden: [usize; 6] = [0, 3, 63, 64, 100, 149];
    let shown: Vec<bool> = (0..9 * 150).map(|at| !hidden.contains(&(at % 150))).collect();
    let (mask_bits, _) = pack_bits(&[shown]);
    let run = |sample: &Sample| {
        let stored = Stored::new(sample, Storage::Paged(16), 1);
        let cut = Cut { rows: 32, keys: 64, workers: 2 };
        let mut case = Case {
            mask_bits: mask_bits.clone(),
            ..Case::new((sample, &stored, Storage::Paged(16)), &variant, cut)
        };
        case.segments =
            Some(case.requests().1.into_iter().map(|s| Segment { mask: Some((0, 150)), ..s }).collect());
        case.run().bits()
    };
    let clean = run(&sample);
    let mut poisoned = sample.clone();
    let poisons = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    for (key, poison) in hidden.into_iter().zip(poisons.into_iter().cycle()) {
        poisoned.k[0][key * 48..][..48].fill(poison);
        poisoned.v[0][key * 32..][..32].fill(poison);
    }
    assert_eq!(run(&poisoned), clean);
}
