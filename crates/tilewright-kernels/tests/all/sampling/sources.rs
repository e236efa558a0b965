//! Parameters from arrays and launch arguments instead of records, row numbers, and tokens without outcomes.

use super::rows::{Rows, bell, requests, run};
use tilewright::sampling::{FilterOrder, SamplingParams, TopKTies};
use tilewright_kernels::sampling::{
    ParamSource, RequestSources, RowCtas, RowKind, SampleParams, request_flags, sample,
};
use tilewright_ptx::Memory;

/// The content of tokens before a launch.
const UNWRITTEN: i32 = -7;

/// Tokens and flags of a launch with one token per row number.
fn drawn(
    rows: &Rows<f32>,
    row_ids: Option<&[i32]>,
    of_row: RowCtas,
    sources: impl FnOnce(&mut Memory) -> RequestSources,
) -> (Vec<i32>, Vec<u8>) {
    let kernel = sample::<f32>("sample", RowKind::Logits, of_row).expect("a valid kernel");
    let mut memory = Memory::new();
    let count = row_ids.map_or(rows.shape[0], <[i32]>::len);
    let (tokens, valid) = (memory.alloc_from(&vec![UNWRITTEN; count]), memory.alloc(count));
    let params = SampleParams {
        scores: rows.load(&mut memory),
        stride: rows.stride as u64,
        shape: rows.shape.map(|extent| extent as u32),
        row_ids: row_ids.map_or(0, |ids| memory.alloc_from(ids)),
        outcomes: 0,
        tokens,
        valid,
        requests: sources(&mut memory),
    };
    run(&kernel, count, &params.all_args(), (1, &mut memory));
    let mut flags = vec![9; count];
    memory.copy_to(valid, &mut flags).expect("flags");
    (memory.read(tokens, count).expect("tokens"), flags)
}

fn of_records(rows: &Rows<f32>, params: &[SamplingParams]) -> Vec<i32> {
    drawn(rows, None, ONE_CTA, |memory| requests(params, memory)).0
}

const ONE_CTA: RowCtas = RowCtas { ctas: 1, threads: 64 };
const CLUSTER: RowCtas = RowCtas { ctas: 2, threads: 64 };

fn params(count: usize) -> Vec<SamplingParams> {
    let of = |i: usize| SamplingParams {
        temperature: [1.0, 0.7, 0.0, 3.0][i % 4],
        top_k: [None, Some(40), Some(3), Some(1)][i / 2 % 4],
        top_p: [0.9, 1.0, 0.3][i % 3],
        min_p: [0.0, 0.0, 0.05][i / 3 % 3],
        order: FilterOrder::Joint,
        top_k_ties: TopKTies::LowestIndex,
        seed: i as u64 * 0x1_0000_0003,
        offset: u64::MAX - i as u64,
    };
    (0..count).map(of).collect()
}

/// The parameters as arrays of their own.
fn arrays(params: &[SamplingParams], memory: &mut Memory) -> RequestSources {
    let floats = |of: fn(&SamplingParams) -> f32, memory: &mut Memory| {
        ParamSource::array(memory.alloc_from(&params.iter().map(of).collect::<Vec<f32>>()), 4)
    };
    let counters = |of: fn(&SamplingParams) -> u64, memory: &mut Memory| {
        ParamSource::array(memory.alloc_from(&params.iter().map(of).collect::<Vec<u64>>()), 8)
    };
    let counts: Vec<i32> =
        params.iter().map(|params| params.top_k.map_or(i32::MAX, u32::cast_signed)).collect();
    RequestSources {
        temperature: floats(|params| params.temperature, memory),
        top_k: ParamSource::array(memory.alloc_from(&counts), 4),
        top_p: floats(|params| params.top_p, memory),
        min_p: floats(|params| params.min_p, memory),
        flags: ParamSource::constant(request_flags(params[0].top_k_ties, params[0].order).into()),
        seed: counters(|params| params.seed, memory),
        offset: counters(|params| params.offset, memory),
        offset_step: 0,
    }
}

fn constants(params: &SamplingParams) -> RequestSources {
    let float = |value: f32| ParamSource::constant(value.to_bits().into());
    RequestSources {
        temperature: float(params.temperature),
        top_k: ParamSource::constant(params.top_k.unwrap_or(u32::MAX).into()),
        top_p: float(params.top_p),
        min_p: float(params.min_p),
        flags: ParamSource::constant(request_flags(params.top_k_ties, params.order).into()),
        seed: ParamSource::constant(params.seed),
        offset: ParamSource::constant(params.offset),
        offset_step: 3,
    }
}

#[test]
fn arrays_and_constants_draw_the_tokens_of_records() {
    let rows = Rows::<f32>::new((24, 700), (1, 2), bell);
    let each = params(24);
    for of_row in [ONE_CTA, CLUSTER] {
        let (tokens, valid) = drawn(&rows, None, of_row, |memory| arrays(&each, memory));
        assert_eq!(tokens, of_records(&rows, &each));
        assert_eq!(valid, [1; 24]);
    }
    for one in &each[..6] {
        let offset = |token: u64| one.offset.wrapping_add(3 * token);
        let all: Vec<_> = (0..24).map(|token| SamplingParams { offset: offset(token), ..*one }).collect();
        let (tokens, _) = drawn(&rows, None, ONE_CTA, |_| constants(one));
        assert_eq!(tokens, of_records(&rows, &all), "{one:?}");
        // one element in memory for all tokens
        let shared = |memory: &mut Memory| {
            let of_one = arrays(&[*one], memory);
            let shared = |source: ParamSource| ParamSource { stride: 0, ..source };
            RequestSources {
                top_p: shared(of_one.top_p),
                seed: shared(of_one.seed),
                offset: shared(of_one.offset),
                ..constants(one)
            }
        };
        assert_eq!(drawn(&rows, None, ONE_CTA, shared).0, tokens, "{one:?}");
    }
}

#[test]
fn tokens_of_row_numbers_and_rows_that_cannot_be_sampled() {
    let value = |row: usize, i: usize| match row {
        3 if i == 600 => f32::NAN,
        4 => f32::NEG_INFINITY,
        _ => bell(row, i),
    };
    let rows = Rows::<f32>::new((5, 700), (0, 0), value);
    let ids = [2, 2, 0, 3, 1, 4, 5, -1, i32::MAX];
    let each = params(ids.len());
    let gathered = Rows::<f32>::new((5, 700), (0, 0), |token, i| value([2, 2, 0, 0, 1][token], i));
    let expected = of_records(&gathered, &each[..5]);
    for of_row in [ONE_CTA, CLUSTER] {
        let (tokens, valid) = drawn(&rows, Some(&ids), of_row, |memory| arrays(&each, memory));
        assert_eq!(valid, [1, 1, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!([tokens[0], tokens[1], tokens[2], tokens[4]], [0, 1, 2, 4].map(|at: usize| expected[at]));
        assert_eq!([tokens[3], tokens[5], tokens[6], tokens[7], tokens[8]], [0; 5]);
    }
}

/// The parameters of each row in memory, beside those in range with the same meaning.
#[test]
fn values_out_of_range_have_a_meaning() {
    let plain = SamplingParams { seed: 5, ..SamplingParams::default() };
    let nan = f32::NAN;
    let cases = [
        (SamplingParams { temperature: -1.0, ..plain }, SamplingParams { temperature: 0.0, ..plain }),
        (SamplingParams { temperature: nan, ..plain }, SamplingParams { temperature: 0.0, ..plain }),
        (
            SamplingParams { temperature: f32::INFINITY, ..plain },
            SamplingParams { temperature: f32::MAX, ..plain },
        ),
        (SamplingParams { top_p: 1.5, ..plain }, plain),
        (SamplingParams { top_p: nan, ..plain }, plain),
        (SamplingParams { top_p: 0.0, ..plain }, SamplingParams { top_k: Some(1), ..plain }),
        (SamplingParams { top_p: -2.0, ..plain }, SamplingParams { top_k: Some(1), ..plain }),
        (SamplingParams { min_p: -0.5, ..plain }, plain),
        (SamplingParams { min_p: nan, ..plain }, plain),
        (SamplingParams { min_p: 7.0, ..plain }, SamplingParams { min_p: 1.0, ..plain }),
        (SamplingParams { top_k: Some(0), ..plain }, plain),
        (SamplingParams { top_k: Some((-3_i32).cast_unsigned()), ..plain }, plain),
        (SamplingParams { top_k: Some(i32::MIN.cast_unsigned()), ..plain }, plain),
        (SamplingParams { top_k: Some(701), ..plain }, plain),
    ];
    let rows = Rows::<f32>::new((cases.len(), 700), (1, 1), bell);
    let (found, expected): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    let (tokens, valid) = drawn(&rows, None, ONE_CTA, |memory| arrays(&found, memory));
    assert_eq!(tokens, of_records(&rows, &expected));
    assert_eq!(valid, [1; 14]);
}
