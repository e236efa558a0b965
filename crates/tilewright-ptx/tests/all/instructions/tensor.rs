//! Tensor map boxes against a loop over their elements.

use super::{descriptors::by_figure, inputs::Random};
use std::collections::HashMap;
use tilewright_ptx::{Swizzle, TensorMap, sim::tensor::BoxSegment};

const SHARED: u32 = 0x1400;

/// The tensor's byte at an address: a hash of the address.
fn byte(address: u64) -> u8 {
    (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Shared memory after a load, element by element, innermost dimension first.
fn by_elements(map: &TensorMap, coordinates: &[i32]) -> HashMap<u32, u8> {
    let mut shared = HashMap::new();
    let count: u32 = map.box_dims.iter().product();
    for element in 0..count {
        let (mut rest, mut address, mut inside) = (element, map.address, true);
        for (at, &side) in map.box_dims.iter().enumerate() {
            let place = i128::from(coordinates[at]) + i128::from(rest % side);
            rest /= side;
            inside &= place >= 0 && place < i128::from(map.dims[at]);
            let stride = if at == 0 { map.element_bytes.into() } else { map.strides[at - 1] };
            address = address.wrapping_add((place * i128::from(stride)) as u64);
        }
        for at in 0..map.element_bytes {
            let place = by_figure(map.swizzle, SHARED + element * map.element_bytes + at);
            shared.insert(place, if inside { byte(address + u64::from(at)) } else { 0 });
        }
    }
    shared
}

/// Shared memory after a load, by segments; each byte is written once.
fn by_segments(segments: &[BoxSegment]) -> HashMap<u32, u8> {
    let mut shared = HashMap::new();
    for segment in segments {
        assert!(segment.bytes > 0 && segment.shared % 16 + segment.bytes <= 16, "{segment:?}");
        for at in 0..segment.bytes {
            let value = segment.global.map_or(0, |global| byte(global + u64::from(at)));
            assert_eq!(shared.insert(segment.shared + at, value), None, "{segment:?} overlaps another");
        }
    }
    shared
}

fn random_map(random: &mut Random) -> TensorMap {
    let element_bytes = 1 << random.below(4);
    let rank = 1 + random.below(5) as usize;
    let swizzle = [Swizzle::None, Swizzle::B128][random.below(2) as usize];
    let inner = swizzle.span().unwrap_or(16 * (1 + random.below(3) as u32)) / element_bytes;
    let mut box_dims = vec![inner];
    box_dims.extend((1..rank).map(|_| 1 + random.below(4) as u32));
    let dims: Vec<u64> = (0..rank).map(|at| 1 + random.below(if at == 0 { 90 } else { 7 })).collect();
    // strides in any order, with gaps
    let strides = (1..rank).map(|_| 1024 * (1 + random.below(500))).collect();
    let address = 16 * random.below(1 << 40);
    TensorMap { element_bytes, address, dims, strides, box_dims, swizzle }
}

#[test]
fn segments_match_a_loop_over_elements() {
    let mut random = Random(11);
    let (mut cut, mut outside) = (0, 0);
    for _ in 0..3000 {
        let map = random_map(&mut random);
        assert_eq!(map.check(), Ok(()), "{map:?}");
        let coordinate = |random: &mut Random, dim: u64| random.below(dim + 14) as i32 - 7;
        let mut coordinates: Vec<i32> = map.dims.iter().map(|&dim| coordinate(&mut random, dim)).collect();
        if random.below(4) == 0 {
            coordinates[0] = 0;
        }
        let segments = map.segments(&coordinates, SHARED);
        cut += segments.iter().filter(|segment| segment.bytes < 16).count();
        outside += segments.iter().filter(|segment| segment.global.is_none()).count();
        assert_eq!(segments.iter().map(|segment| segment.bytes).sum::<u32>(), map.box_bytes());
        assert_eq!(by_segments(&segments), by_elements(&map, &coordinates), "{map:?} at {coordinates:?}");
    }
    assert!(cut > 1000 && outside > 1000, "edges were met: {cut} {outside}");
}

fn page() -> TensorMap {
    TensorMap {
        element_bytes: 2,
        address: 0x10_0000,
        dims: vec![128, 16, 8, 100],
        strides: vec![256, 4096, 32768],
        box_dims: vec![64, 16, 1, 1],
        swizzle: Swizzle::B128,
    }
}

/// A page of a KV cache, and coordinates at the limits of i32.
#[test]
fn a_kv_cache_page_has_the_expected_segments() {
    let map = page();
    assert_eq!((map.check(), map.box_bytes()), (Ok(()), 2048));
    let segments = map.segments(&[64, 0, 3, 7], 0x2000);
    assert_eq!(segments.len(), 128);
    let start = 0x10_0000 + 7 * 32768 + 3 * 4096 + 128;
    assert_eq!(segments[0], BoxSegment { shared: 0x2000, global: Some(start), bytes: 16 });
    assert_eq!(segments[9], BoxSegment { shared: 0x2080, global: Some(start + 256 + 16), bytes: 16 });
    for coordinates in [[i32::MAX; 4], [i32::MIN; 4], [0, 0, 0, i32::MAX], [i32::MIN, 0, 0, 0]] {
        let segments = map.segments(&coordinates, 0x2000);
        assert!(segments.iter().all(|segment| segment.global.is_none()));
        assert_eq!(segments.len(), 128);
    }
}

/// A change that violates a rule.
type Change = fn(&mut TensorMap);

#[test]
fn the_drivers_rules() {
    let error = |change: Change| {
        let mut map = page();
        change(&mut map);
        map.check().unwrap_err()
    };
    let rules: [(Change, &str); 16] = [
        (|map| map.element_bytes = 3, "elements of 3 bytes; they have 1, 2, 4 or 8"),
        (|map| map.dims = vec![], "0 dimensions; there are 1 to 5"),
        (|map| map.dims = vec![1; 6], "6 dimensions; there are 1 to 5"),
        (|map| map.strides = vec![16], "1 strides for 4 dimensions; all but the innermost have one"),
        (|map| map.address = 8, "address 0x8 is not a multiple of 16"),
        (|map| map.dims[1] = 0, "dims[1] = 0 is not in 1..=2^32"),
        (|map| map.dims[0] = (1 << 32) + 1, "dims[0] = 4294967297 is not in 1..=2^32"),
        (|map| map.strides[2] = 24, "strides[2] = 24 is not a multiple of 16 below 2^40"),
        (|map| map.strides[0] = 1 << 40, "strides[0] = 1099511627776 is not a multiple of 16 below 2^40"),
        (|map| map.box_dims = vec![64], "1 box dimensions for 4 dimensions"),
        (|map| map.box_dims[1] = 0, "box_dims[1] = 0 is not in 1..=256"),
        (|map| map.box_dims[1] = 257, "box_dims[1] = 257 is not in 1..=256"),
        (|map| map.box_dims[0] = 36, "the box's innermost 72 bytes are not a multiple of 16"),
        (|map| map.box_dims[0] = 128, "the box's innermost 256 bytes exceed the swizzle's 128"),
        (
            |map| map.box_dims[0] = 32,
            "the box's innermost 64 bytes do not fill the swizzle's 128, which is not simulated",
        ),
        (
            |map| map.box_dims[1..].fill(16),
            "a box of 524288 bytes is more than shared memory's addresses, 2^18",
        ),
    ];
    for (change, want) in rules {
        assert_eq!(error(change), format!("tensor map: {want}"));
    }
    let far = error(|map| (map.dims, map.strides) = (vec![8, 1 << 32, 1, 1], vec![(1 << 40) - 16, 16, 16]));
    assert_eq!(far, "tensor map: the tensor's end is beyond 2^63");
}
