//! Errors of `kv`, the state merges and `gemm.linear`.

use super::refused;
use crate::elements::Elements;
use tilewright::{
    Cpu, Dtype, KvCacheMut, KvLayout, Operator, PageTable, Result,
    attention::{StateMerge, merge_state, merge_states},
    gemm::linear,
    kv::{
        append::{NewTokens, append_paged_kv_cache, get_batch_indices_positions},
        get_seq_lens,
    },
};

const F32: Dtype = Dtype::F32;
const F16: Dtype = Dtype::F16;
const I8: Dtype = Dtype::I8;

fn zeros(dtype: Dtype, shape: &[usize]) -> Elements {
    Elements::filled(dtype, shape.iter().product(), 0.0)
}

/// A valid append: two tokens of request 1, three heads, pages of 4, HND.
struct AppendCall<'a> {
    k: (Dtype, Vec<usize>),
    v: (Dtype, Vec<usize>),
    k_cache: (Dtype, Vec<usize>),
    v_cache: (Dtype, Vec<usize>),
    batch_indices: &'a [i32],
    positions: &'a [i32],
    table: PageTable<'a>,
}

impl AppendCall<'_> {
    fn new() -> Self {
        Self {
            k: (F16, vec![2, 3, 8]),
            v: (F16, vec![2, 3, 6]),
            k_cache: (F16, vec![5, 3, 4, 8]),
            v_cache: (F16, vec![5, 3, 4, 6]),
            batch_indices: &[1, 1],
            positions: &[3, 4],
            table: PageTable::new(&[0, 1, 3], &[0, 4, 1], &[1, 1], 4),
        }
    }

    fn run(&self) -> Result<()> {
        let [k, v] = [&self.k, &self.v].map(|(dtype, shape)| zeros(*dtype, shape));
        let [mut k_cache, mut v_cache] =
            [&self.k_cache, &self.v_cache].map(|(dtype, shape)| zeros(*dtype, shape));
        let cache = KvCacheMut { k: k_cache.view_mut(&self.k_cache.1), v: v_cache.view_mut(&self.v_cache.1) };
        let new = NewTokens {
            k: k.view(&self.k.1),
            v: v.view(&self.v.1),
            batch_indices: self.batch_indices,
            positions: self.positions,
        };
        append_paged_kv_cache(&Cpu::with_threads(1).unwrap(), &new, cache, KvLayout::Hnd, &self.table)
    }

    #[track_caller]
    fn refuses(change: impl FnOnce(&mut Self), text: &str) {
        let mut call = Self::new();
        change(&mut call);
        refused(call.run(), &format!("kv.append_paged_kv_cache: {text}"));
    }
}

#[test]
fn appends_with_tensors_that_do_not_fit() {
    assert_eq!(AppendCall::new().run(), Ok(()));
    let axes = "expected [num_tokens, num_kv_heads, head_dim]";
    let text = format!("k has shape [3, 3, 8], {axes} = [2, 3, 8]");
    AppendCall::refuses(|call| call.k.1 = vec![3, 3, 8], &text);
    let text = format!("k has shape [2, 24], {axes} = [2, 24, 0]");
    AppendCall::refuses(|call| call.k.1 = vec![2, 24], &text);
    let text = format!("v has shape [2, 1, 6], {axes} = [2, 3, 6]");
    AppendCall::refuses(|call| call.v.1 = vec![2, 1, 6], &text);
    let text = "cache k has shape [5, 4, 3, 8], \
        expected [num_pages, num_kv_heads, page_size, head_dim] = [5, 3, 4, 8] (HND)";
    AppendCall::refuses(|call| call.k_cache.1 = vec![5, 4, 3, 8], text);
    let text = "cache v has shape [5, 3, 4, 8], \
        expected [num_pages, num_kv_heads, page_size, head_dim] = [5, 3, 4, 6] (HND)";
    AppendCall::refuses(|call| call.v_cache.1 = vec![5, 3, 4, 8], text);
}

#[test]
fn appends_to_places_that_do_not_exist() {
    let pages = "is not in 0..4, the pages of the cache";
    AppendCall::refuses(|call| call.k_cache.1[0] = 4, &format!("page = 4 {pages}"));
    AppendCall::refuses(|call| call.v_cache.1[0] = 4, &format!("page = 4 {pages}"));
    AppendCall::refuses(|call| call.positions = &[3], "positions has shape [1], expected [num_tokens] = [2]");
    AppendCall::refuses(
        |call| call.batch_indices = &[1, 2],
        "token 1: batch_index = 2 is not in 0..2, nor -1 to skip the token",
    );
    AppendCall::refuses(
        |call| call.batch_indices = &[-2, 1],
        "token 0: batch_index = -2 is not in 0..2, nor -1 to skip the token",
    );
    AppendCall::refuses(|call| call.positions = &[3, 5], "token 1: position = 5 is not in 0..5 of request 1");
    AppendCall::refuses(
        |call| call.positions = &[-2, 4],
        "token 0: position = -2 is not in 0..5 of request 1",
    );
    let text = "token 0: position = 2147483647 is not in 0..5 of request 1";
    AppendCall::refuses(|call| call.positions = &[i32::MAX, 4], text);
    let table = PageTable::new(&[0, 1, 3], &[0, 4, 1], &[1, 5], 4);
    AppendCall::refuses(|call| call.table = table, "request 1: last_page_len = 5 is not in 1..=4");
    let none = |call: &mut AppendCall<'_>| {
        (call.k_cache.1, call.v_cache.1) = (vec![5, 3, 0, 8], vec![5, 3, 0, 6]);
        call.table.page_size = 0;
    };
    AppendCall::refuses(none, "page_size = 0, expected at least 1");
}

#[test]
fn appends_of_tokens_with_gaps_inside() {
    let new = zeros(F32, &[40]);
    let view = new.strided(0, &[2, 1, 4], &[20, 20, 2]);
    let (mut k, mut v) = (zeros(F32, &[8]), zeros(F32, &[8]));
    let cache = KvCacheMut { k: k.view_mut(&[1, 2, 1, 4]), v: v.view_mut(&[1, 2, 1, 4]) };
    let append = NewTokens { k: view, v: view, batch_indices: &[0, 0], positions: &[0, 1] };
    let table = PageTable::new(&[0, 1], &[0], &[2], 2);
    let result = append_paged_kv_cache(&Cpu::with_threads(1).unwrap(), &append, cache, KvLayout::Nhd, &table);
    let text = "k has strides [20, 20, 2]: head_dim, the last axis, must have stride 1";
    refused(result, &format!("kv.append_paged_kv_cache: {text}"));
}

#[test]
fn lengths_and_positions_that_contradict() {
    let positions = |indptr: &[i64], lens: &[usize], text: &str| {
        refused(
            get_batch_indices_positions(indptr, lens),
            &format!("kv.get_batch_indices_positions: {text}"),
        );
    };
    positions(&[0, 3], &[2], "request 0: appends 3 tokens, but seq_len = 2");
    positions(&[0, 3], &[5, 6], "append_indptr has 2 entries, expected num_requests + 1 = 3");
    positions(&[0, 3, 2], &[5, 6], "request 1: append_indptr decreases from 3 to 2");
    positions(&[4, 5], &[5], "append_indptr starts at 4, expected 0");
    positions(&[0, 1], &[1 << 31], "request 0: seq_len = 2147483648 does not fit in 32 bits");
    let most = "request 0: seq_len = 18446744073709551615 does not fit in 32 bits";
    positions(&[0, i64::MAX], &[usize::MAX], most);
    let table = PageTable::new(&[0, 1], &[0], &[9], 8);
    refused(get_seq_lens(&table), "kv.get_seq_lens: request 0: last_page_len = 9 is not in 1..=8");
    let table = PageTable::new(&[0, 9], &[0; 9], &[9], usize::MAX);
    refused(
        get_seq_lens(&table),
        "kv.get_seq_lens: request 0: 9 pages of 18446744073709551615 tokens overflow",
    );
}

#[test]
fn merges_of_tensors_that_do_not_fit() {
    type MergeCase<'a> = ([&'a [usize]; 4], [Dtype; 4], &'a str);
    let (o, lse, out, out_lse) = (&[2, 5, 3, 8][..], &[2, 5, 3][..], &[2, 3, 8][..], &[2, 3][..]);
    let right = [F16, F32, F16, F32];
    let cases: [MergeCase<'_>; 8] = [
        (
            [&[2, 5, 24], lse, out, out_lse],
            right,
            "o has shape [2, 5, 24], expected [num_rows, num_states, num_heads, head_dim]",
        ),
        (
            [o, &[2, 3, 5], out, out_lse],
            right,
            "lse has shape [2, 3, 5], expected [num_rows, num_states, num_heads] = [2, 5, 3]",
        ),
        (
            [o, lse, &[2, 8, 3], out_lse],
            right,
            "out has shape [2, 8, 3], expected [num_rows, num_heads, head_dim] = [2, 3, 8]",
        ),
        ([o, lse, out, &[3, 2]], right, "out_lse has shape [3, 2], expected [num_rows, num_heads] = [2, 3]"),
        ([o, lse, out, &[6]], right, "out_lse has shape [6], expected [num_rows, num_heads] = [2, 3]"),
        ([o, lse, out, out_lse], [F16, F32, F32, F32], "out is f32, expected f16"),
        ([o, lse, out, out_lse], [F16, F16, F16, F32], "lse is f16, expected f32"),
        ([o, lse, out, out_lse], [F16, F32, F16, F16], "out_lse is f16, expected f32"),
    ];
    for (shapes, dtypes, text) in cases {
        let [o, lse, mut out, mut out_lse] = [0, 1, 2, 3].map(|i| zeros(dtypes[i], shapes[i]));
        let (out, out_lse) = (out.view_mut(shapes[2]), out_lse.view_mut(shapes[3]));
        let result = merge_states(
            &Cpu::with_threads(1).unwrap(),
            o.view(shapes[0]),
            lse.view(shapes[1]),
            out,
            out_lse,
        );
        refused(result, &format!("attention.merge_states: {text}"));
    }
}

#[test]
fn merges_of_two_that_do_not_fit() {
    type MergeCase<'a> = ([&'a [usize]; 4], [Dtype; 4], &'a str);
    let (o, lse) = (&[2, 3, 8][..], &[2, 3][..]);
    let right = [F16, F32, F16, F32];
    let cases: [MergeCase<'_>; 7] = [
        ([&[6, 8], lse, o, lse], right, "o has shape [6, 8], expected [num_rows, num_heads, head_dim]"),
        (
            [o, lse, &[2, 3, 9], lse],
            right,
            "other has shape [2, 3, 9], expected [num_rows, num_heads, head_dim] = [2, 3, 8]",
        ),
        ([o, &[3, 2], o, lse], right, "lse has shape [3, 2], expected [num_rows, num_heads] = [2, 3]"),
        ([o, lse, o, &[2, 4]], right, "other_lse has shape [2, 4], expected [num_rows, num_heads] = [2, 3]"),
        ([o, lse, o, lse], [F16, F32, F32, F32], "other is f32, expected f16"),
        ([o, lse, o, lse], [F16, F16, F16, F32], "lse is f16, expected f32"),
        ([o, lse, o, lse], [F16, F32, F16, F16], "other_lse is f16, expected f32"),
    ];
    for (shapes, dtypes, text) in cases {
        let [mut o, mut lse, other, other_lse] = [0, 1, 2, 3].map(|i| zeros(dtypes[i], shapes[i]));
        let (o, lse) = (o.view_mut(shapes[0]), lse.view_mut(shapes[1]));
        let (other, other_lse) = (other.view(shapes[2]), other_lse.view(shapes[3]));
        let result = merge_state(&Cpu::with_threads(1).unwrap(), o, lse, other, other_lse);
        refused(result, &format!("attention.merge_state: {text}"));
    }
}

#[test]
fn masks_of_merges_that_do_not_fit() {
    let cases = [
        (true, I8, 3, "attention.merge_state: mask has shape [3], expected [num_rows] = [2]"),
        (true, F32, 2, "attention.merge_state: mask is f32, expected int8"),
        (false, I8, 2, "attention.merge_states: mask is a tensor, expected None unless in_place is set"),
    ];
    for (in_place, dtype, rows, text) in cases {
        let [o, mut out, lse, mut out_lse] =
            [&[2, 3, 8][..], &[2, 3, 8], &[2, 3], &[2, 3]].map(|s| zeros(F32, s));
        let mask = zeros(dtype, &[rows]);
        let merge = StateMerge {
            o: o.view(&[2, 3, 8]),
            lse: lse.view(&[2, 3]),
            out: out.view_mut(&[2, 3, 8]),
            out_lse: out_lse.view_mut(&[2, 3]),
            in_place,
            mask: Some(mask.view(&[rows])),
        };
        refused(merge.run(&Cpu::with_threads(1).unwrap()), text);
    }
}

/// `linear` on zeros of these shapes and strides.
fn linear_of(
    x: (Dtype, &[usize], &[usize]),
    weight: (&[usize], &[usize]),
    bias: (&[usize], &[usize]),
    out: (Dtype, &[usize], &[usize]),
) -> Result<()> {
    let (x_memory, memory, mut out_memory) = (zeros(x.0, &[400]), zeros(F16, &[400]), zeros(out.0, &[400]));
    linear(
        &Cpu::with_threads(1).unwrap(),
        x_memory.strided(0, x.1, x.2),
        memory.strided(0, weight.0, weight.1),
        Some(memory.strided(0, bias.0, bias.1)),
        out_memory.strided_mut(0, out.1, out.2),
    )
}

#[test]
fn products_of_tensors_that_do_not_fit() {
    let (x, weight, bias, out) = (
        (F32, &[2, 5][..], &[5, 1][..]),
        (&[3, 5][..], &[5, 1][..]),
        (&[3][..], &[1][..]),
        (F32, &[2, 3][..], &[3, 1][..]),
    );
    assert_eq!(linear_of(x, weight, bias, out), Ok(()));
    let says = |result: Result<()>, text: &str| refused(result, &format!("gemm.linear: {text}"));
    says(linear_of((F32, &[10], &[1]), weight, bias, out), "x has shape [10], expected [rows, in_features]");
    let text = "weight has shape [3, 4], expected [out_features, in_features] = [3, 5]";
    says(linear_of(x, (&[3, 4], &[4, 1]), bias, out), text);
    let text = "weight has shape [3], expected [out_features, in_features] = [3, 5]";
    says(linear_of(x, (&[3], &[1]), bias, out), text);
    let text = "out has shape [3, 2], expected [rows, out_features] = [2, 3]";
    says(linear_of(x, weight, bias, (F32, &[3, 2], &[2, 1])), text);
    says(linear_of(x, weight, (&[4], &[1]), out), "bias has shape [4], expected [out_features] = [3]");
    says(linear_of((Dtype::I8, x.1, x.2), weight, bias, out), "x is int8, expected f32, f16 or bf16");
    says(linear_of(x, weight, bias, (Dtype::Bf16, out.1, out.2)), "out is bf16, expected f32");
    let halves = linear_of((F16, x.1, x.2), weight, bias, (Dtype::Bf16, out.1, out.2));
    says(halves, "out is bf16, expected f16 or f32");
    let text = "x has stride 2 along its last axis, expected 1";
    says(linear_of((F32, x.1, &[1, 2]), weight, bias, out), text);
    let text = "out has stride 2 along its last axis, expected 1";
    says(linear_of(x, weight, bias, (F32, out.1, &[1, 2])), text);
    let text = "weight has strides [6, 1], expected a contiguous tensor";
    says(linear_of(x, (weight.0, &[6, 1]), bias, out), text);
    let text = "bias has strides [2], expected a contiguous tensor";
    says(linear_of(x, weight, (bias.0, &[2]), out), text);
}

#[test]
fn unused_strides_do_not_overflow() {
    let most = usize::MAX;
    let (x, out) = ((F32, &[1, 5][..], &[most, 1][..]), (F32, &[1, 3][..], &[most, 1][..]));
    assert_eq!(linear_of(x, (&[3, 5], &[5, 1]), (&[3], &[1]), out), Ok(()));
    let (x, out) = ((F32, &[2, 1][..], &[7, most][..]), (F32, &[2, 1][..], &[9, most][..]));
    assert_eq!(linear_of(x, (&[1, 1], &[most, most]), (&[1], &[most]), out), Ok(()));
}
