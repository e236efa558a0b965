//! Threads for rows of each length.

use tilewright_kernels::tile::RowPartition;

#[test]
fn classes_fit_rows_with_few_idle_threads() {
    for chunks in 1..=RowPartition::MAX_CHUNKS {
        let rows = RowPartition::for_chunks(chunks).expect("a class");
        // the name has threads per row and chunks per thread
        let capacity: u32 = rows.name().split('x').map(|factor| factor.parse::<u32>().unwrap()).product();
        assert!(chunks <= capacity, "{chunks} chunks in {rows:?}");
        let idle = capacity - chunks;
        assert!(
            idle < 128.max(capacity / 4) || capacity <= 128,
            "{chunks} chunks leave {idle} of {rows:?} idle"
        );
    }
    assert_eq!(RowPartition::for_chunks(RowPartition::MAX_CHUNKS + 1), None);
}
