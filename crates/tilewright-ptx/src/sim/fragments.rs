//! `ldmatrix`, `stmatrix` and `mma.sync`: synchronous matrix instructions of one warp.

use super::{Exec, FaultCause, MemoryRange, Next, Range, matrix, traffic};
use crate::isa::{Elements, Lanes, MatrixOp, Space};

impl Exec<'_, '_> {
    pub(super) fn matrix(
        &mut self,
        op: MatrixOp,
        results: Range,
        operands: Range,
    ) -> Result<Next, FaultCause> {
        match op {
            MatrixOp::Load(count, transposed) => {
                self.load_matrices(count, transposed, results, operands)?;
            }
            MatrixOp::Store(count, transposed) => self.store_matrices(count, transposed, operands)?,
            MatrixOp::Mma(elements) => self.mma(elements, results, operands)?,
            MatrixOp::Wgmma { .. } => return self.wgmma(op, results, operands),
            MatrixOp::WgmmaFence => self.warp.wgmma.fences += 1,
            MatrixOp::WgmmaCommit => {
                let issued = self.warp.wgmma.issued;
                self.warp.wgmma.commits.push_back(issued);
            }
            MatrixOp::WgmmaWait(left) => return self.wait_wgmma(left),
        }
        Ok(Next::Advance)
    }

    fn mma(&mut self, elements: Elements, results: Range, operands: Range) -> Result<(), FaultCause> {
        self.world.report.matrix_instructions += 1;
        let at = |at: usize| *self.operand(operands, at);
        let a = [at(0), at(1), at(2), at(3)];
        let (b, c) = ([at(4), at(5)], [at(6), at(7), at(8), at(9)]);
        let d = matrix::mma(elements, &a, &b, &c);
        for (at, d) in d.iter().enumerate() {
            self.write(self.world.program.regs(results)[at], d)?;
        }
        Ok(())
    }

    /// Counts the bank conflicts of each matrix, 8 lanes at a time.
    fn count_rows(&mut self, addresses: &Lanes, count: usize) {
        for matrix in 0..count {
            self.world.report.bank_conflicts += traffic::bank_conflicts(addresses, 0xff << (8 * matrix), 16);
        }
    }

    fn load_matrices(
        &mut self,
        count: usize,
        transposed: bool,
        results: Range,
        operands: Range,
    ) -> Result<(), FaultCause> {
        let addresses = self.addresses(operands, 0, false);
        self.count_rows(&addresses, count);
        let mut rows = [[0; 16]; 32];
        for lane in 0..8 * count {
            let location = self.locate_aligned(Space::Shared, addresses[lane], 16, lane)?;
            self.record_access(false, MemoryRange { location, bytes: 16 }, lane, self.mark(lane, 0))?;
            self.faulting_lanes = 1 << lane;
            rows[lane].copy_from_slice(self.read_bytes(location, 16)?);
        }
        self.faulting_lanes = self.mask;
        let loaded = matrix::ldmatrix(count, transposed, &rows[..8 * count]);
        for (at, lanes) in loaded.iter().enumerate() {
            self.write(self.world.program.regs(results)[at], lanes)?;
        }
        Ok(())
    }

    fn store_matrices(&mut self, count: usize, transposed: bool, operands: Range) -> Result<(), FaultCause> {
        let addresses = self.addresses(operands, 0, false);
        self.count_rows(&addresses, count);
        let registers: Vec<Lanes> = (0..count).map(|at| *self.operand(operands, 2 + at)).collect();
        let rows = matrix::stmatrix(count, transposed, &registers);
        for (lane, row) in rows.iter().enumerate() {
            let location = self.locate_aligned(Space::Shared, addresses[lane], 16, lane)?;
            self.record_access(true, MemoryRange { location, bytes: 16 }, lane, self.mark(lane, 0))?;
            self.write_bytes(location, row);
        }
        Ok(())
    }
}
