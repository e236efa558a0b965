//! Records of plans, on the host and in registers.

use tilewright_kernels::attention::items::{
    MergeItem, MergeSource, NONE, RequestRows, RequestTable, WorkItem, WorkItemRegs,
};
use tilewright_ptx::{Arg, Builder, Launch, Memory};

#[test]
fn records_are_words_in_the_order_of_their_fields() {
    let item = WorkItem { qo_begin: 1, offset: -2, partial: NONE, mask_bit_high: 3, ..WorkItem::default() };
    let words = item.to_words();
    assert_eq!((words[0], words[4], words[10], words[15]), (1, u32::MAX - 1, NONE, 3));
    let merge = MergeItem { source_end: 7, arrivals: 2, ..MergeItem::default() };
    assert_eq!(merge.to_words(), [0, 0, 0, 0, 7, 2, 0, 0]);
    assert_eq!((WorkItem::BYTES, MergeItem::BYTES, MergeSource::BYTES, RequestRows::BYTES), (64, 32, 8, 8));
}

#[test]
fn records_round_trip_to_registers() {
    let kernel = Builder::kernel("load", 32, |k| {
        let (items, out) = (k.global::<u32>("items"), k.global::<u32>("out"));
        let item = WorkItemRegs::load(k, items, k.constant(1));
        k.when(k.thread().eq(0), || {
            out.store(item.kv_end);
            out.plus(1).store(item.offset.reinterpret::<u32>());
            out.plus(2).store(item.mask_bit_low);
            out.plus(3).store(item.qo_begin);
            out.plus(4).store(item.partial);
        });
    })
    .unwrap();
    let item =
        WorkItem { qo_begin: 7, kv_end: 5, offset: -9, partial: 6, mask_bit_low: 8, ..WorkItem::default() };
    let mut memory = Memory::new();
    let items = memory.alloc_from(&[WorkItem::default().to_words(), item.to_words()].concat());
    let out = memory.alloc(20);
    let args = [Arg::U64(items), Arg::U64(out)];
    Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed: 0 }.run(&mut memory).unwrap();
    assert_eq!(memory.read::<u32>(out, 5).unwrap(), [5, (-9_i32).cast_unsigned(), 8, 7, 6]);
}

#[test]
fn find_request_finds_the_owner_of_a_row() {
    let kernel = Builder::kernel("request", 32, |k| {
        let (rows, out) = (k.global::<u32>("requests"), k.global::<u32>("out"));
        let (requests, row) = (RequestTable { rows, count: k.param("count") }, k.thread());
        // a guess for all rows, one per row, and one beyond all requests
        for (at, guess) in [k.constant(2), row - 1, row + 100].into_iter().enumerate() {
            out.at(row * 3).plus(at).store(requests.find(row, guess));
        }
    })
    .unwrap();
    let ends = [3_u32, 3, 4, 20, 32];
    let words: Vec<u32> = ends.iter().flat_map(|&end| RequestRows { end, offset: 0 }.to_words()).collect();
    let mut memory = Memory::new();
    let (requests, out) = (memory.alloc_from(&words), memory.alloc(3 * 128));
    let args = [Arg::U64(requests), Arg::U64(out), Arg::U32(ends.len() as u32)];
    Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed: 0 }.run(&mut memory).unwrap();
    let expected = (0..32).map(|row| [ends.iter().position(|&end| end > row).unwrap() as u32; 3]);
    assert_eq!(memory.read::<u32>(out, 96).unwrap(), expected.flatten().collect::<Vec<_>>());
}

#[test]
fn look_up_request_sets_request_and_offset_of_mixed_items() {
    let kernel = Builder::kernel("look_up", 32, |k| {
        let (rows, out) = (k.global::<u32>("requests"), k.global::<u32>("out"));
        let (requests, row) = (RequestTable { rows, count: k.param("count") }, k.thread());
        // rows from 8 on belong to an item of request 7
        let known = row.lt(8).select(NONE, k.constant(7));
        let (request, offset) = (k.var("request", known), k.var("offset", 50_i32));
        requests.look_up(row, known, Some(request), offset);
        let alone = k.var("alone", 50_i32);
        requests.look_up(row, known, None, alone);
        let found = [request.get(), offset.get().reinterpret(), alone.get().reinterpret()];
        found.into_iter().enumerate().for_each(|(at, word)| out.at(row * 3).plus(at).store(word));
    })
    .unwrap();
    let ends = [(3, 100), (3, 200), (5, 9), (32, -2)];
    let words = ends.map(|(end, offset)| RequestRows { end, offset }.to_words());
    let mut memory = Memory::new();
    let (requests, out) = (memory.alloc_from(&words.concat()), memory.alloc(32 * 12));
    let args = [Arg::U64(requests), Arg::U64(out), Arg::U32(4)];
    Launch { kernel: &kernel, grid: [1, 1, 1], args: &args, seed: 0 }.run(&mut memory).unwrap();
    let expected = |row: u32| match row {
        0..3 => [0, 100, 100],
        3..5 => [2, 9, 9],
        5..8 => [3, -2, -2],
        _ => [7, 50, 50],
    };
    let expected: Vec<u32> = (0..32).flat_map(expected).map(i32::cast_unsigned).collect();
    assert_eq!(memory.read::<u32>(out, 96).unwrap(), expected);
}
