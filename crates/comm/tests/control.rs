//! What every control lane must do, held in both; and what a lane of sockets does with bytes and callers of no good.

mod common;

use std::io::{Read, Write, stderr};
use std::net::{Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{PATIENT, connected};
use guildhall_comm::control::{ControlLane, Doorway, FRAME_BYTES_MAX, Received, Signal, mailbox};
use guildhall_comm::{CallSite, Clock, Collective, ManualClock, SystemClock, threads};

type Lane = Arc<dyn ControlLane>;

/// Holds `law` in the lanes of a world of `size` ranks, both in one process.
fn hold(size: usize, law: impl Fn(Vec<Lane>)) {
    law(mailbox::lanes(size));
    law(connected(size));
}

fn said(text: &str) -> Signal {
    Signal::Failed { rank: 7, reason: text.to_owned(), site: None }
}

/// The next signal, which must come in time.
fn next(lane: &Lane) -> Received {
    let clock = SystemClock::new();
    lane.receive_by(&*clock, PATIENT.timeout).expect("it has been sent")
}

#[test]
fn lanes_are_in_rank_order() {
    hold(3, |lanes| {
        let places: Vec<_> = lanes.iter().map(|lane| (lane.rank(), lane.size())).collect();
        assert_eq!(places, [(0, 3), (1, 3), (2, 3)]);
    });
}

#[test]
fn a_signal_reaches_whom_it_is_sent_to_and_nobody_else() {
    hold(3, |lanes| {
        let waiting = Signal::Waiting {
            collective: Collective::AllToAll,
            site: CallSite { file: "layer.rs".into(), line: 12, column: 5 },
            missing: vec![1],
        };
        lanes[0].send(2, &waiting);
        lanes[0].send(0, &said("to myself"));
        assert_eq!(next(&lanes[2]), Received { from: 0, signal: waiting });
        assert_eq!(next(&lanes[0]), Received { from: 0, signal: said("to myself") });
        lanes[1].send_all(&said("to all"));
        for rank in [0, 2] {
            assert_eq!(next(&lanes[rank]), Received { from: 1, signal: said("to all") });
        }
        assert!(lanes.iter().all(|lane| lane.receive().is_none()));
    });
}

/// Two ranks send at once; each one's signals come in its order.
#[test]
fn signals_keep_the_order_of_their_sender() {
    const COUNT: usize = 500;
    hold(3, |lanes| {
        thread::scope(|scope| {
            for lane in &lanes[1..] {
                scope.spawn(|| (0..COUNT).for_each(|index| lane.send(0, &said(&index.to_string()))));
            }
            let mut heard = [0; 3];
            for _ in 0..2 * COUNT {
                let Received { from, signal } = next(&lanes[0]);
                assert_eq!(signal, said(&heard[from].to_string()), "of rank {from}");
                heard[from] += 1;
            }
            assert_eq!(heard, [0, COUNT, COUNT]);
        });
    });
}

#[test]
fn leaving_is_the_last_thing_heard_of_a_rank() {
    hold(3, |mut lanes| {
        let leaver = lanes.remove(1);
        leaver.send_all(&said("goodbye"));
        drop(leaver);
        for lane in &lanes {
            assert_eq!(next(lane), Received { from: 1, signal: said("goodbye") });
            assert_eq!(next(lane), Received { from: 1, signal: Signal::Left });
            // Whoever has left hears nothing, and those who stay go on.
            lane.send(1, &said("are you there?"));
        }
        lanes[0].send(2, &said("I am"));
        assert_eq!(next(&lanes[1]), Received { from: 0, signal: said("I am") });
        assert!(lanes.iter().all(|lane| lane.receive().is_none()));
    });
}

#[test]
fn an_abort_of_the_data_leaves_the_lane_open() {
    hold(2, |lanes| {
        let world = threads::world(2, PATIENT);
        world[0].abort("enough");
        assert!(world[1].barrier().is_err());
        lanes[1].send(0, &said("why?"));
        assert_eq!(next(&lanes[0]), Received { from: 1, signal: said("why?") });
    });
}

#[test]
fn a_receiver_waits_until_its_deadline_and_no_longer() {
    hold(2, |lanes| {
        let clock = ManualClock::new();
        thread::scope(|scope| {
            let receiver = scope.spawn(|| lanes[0].receive_by(&*clock, Duration::from_secs(3)));
            clock.await_sleepers(1);
            clock.advance(Duration::from_secs(2));
            clock.await_sleepers(1);
            assert!(!receiver.is_finished());
            clock.advance(Duration::from_secs(1));
            assert_eq!(receiver.join().expect("it does not panic"), None);
        });
    });
}

#[test]
fn a_sleeping_receiver_is_woken() {
    hold(2, |lanes| {
        let clock = ManualClock::new();
        thread::scope(|scope| {
            let receiver = scope.spawn(|| lanes[0].receive_by(&*clock, Duration::from_secs(3)));
            clock.await_sleepers(1);
            lanes[1].send(0, &said("wake up"));
            assert_eq!(receiver.join().expect("it does not panic").expect("it was sent").signal, said("wake up"));
        });
        assert_eq!(clock.now(), Duration::ZERO);
    });
}

/// What a rank of a world of `size` calls another with.
fn greeting(size: u32, caller: u32, called: u32) -> Vec<u8> {
    [b"guildctl".as_slice(), [size, caller, called].map(u32::to_le_bytes).as_flattened()].concat()
}

/// Rank 0 of two, and the bare connection of its peer.
fn with_a_bare_peer() -> (Lane, TcpStream) {
    with_a_bare_peer_of(PATIENT.timeout)
}

/// The same of ranks that wait so long for each other.
fn with_a_bare_peer_of(patience: Duration) -> (Lane, TcpStream) {
    let doorway = Doorway::open("127.0.0.1:0").expect("a free port");
    let address = doorway.address().expect("it is open");
    let mut stream = TcpStream::connect(address).expect("it is open");
    stream.write_all(&greeting(2, 1, 0)).expect("it is read");
    let lane = doorway.pass(0, &[address, address], patience).expect("rank 1 has called");
    (lane, stream)
}

/// Why rank 0 thinks that its peer failed, after it sent `bytes`.
fn reason_after(bytes: &[u8]) -> String {
    let (lane, mut stream) = with_a_bare_peer();
    stream.write_all(bytes).expect("it is read");
    stream.shutdown(Shutdown::Write).expect("it is connected");
    match next(&lane) {
        Received { from: 1, signal: Signal::Failed { rank: 1, reason, site: None } } => reason,
        other => panic!("{other:?}"),
    }
}

/// Who takes nothing of what is sent to it is given up when ranks give each other up, not after a minute.
#[test]
fn a_peer_that_reads_nothing_is_given_up() {
    let (lane, _mute) = with_a_bare_peer_of(Duration::from_secs(2));
    let (begun, words) = (Instant::now(), Signal::Told("more than buffers hold".repeat(1000)));
    let is_given_up = || match lane.receive() {
        None => false,
        Some(Received { from: 1, signal: Signal::Failed { rank: 1, .. } }) => true,
        other => panic!("{other:?}"),
    };
    while !is_given_up() {
        assert!(begun.elapsed() < Duration::from_secs(30), "it is waited for");
        lane.send(1, &words);
    }
}

#[test]
fn a_connection_that_ends_without_a_word_is_a_failure() {
    for bytes in [&[][..], &[1], &[9, 0, 0, 0], &[2, 0, 0, 0, 3]] {
        assert!(reason_after(bytes).contains("closed without a word"), "{bytes:?}");
    }
}

#[test]
fn bytes_that_are_no_signal_are_a_failure() {
    assert!(reason_after(&[1, 0, 0, 0, 9]).contains("no control signal: 9 is no signal"));
    assert!(reason_after(&[0, 0, 0, 0]).contains("no control signal: it ends within its tag"));
    let reason = reason_after(&[0xff; 4]);
    assert!(reason.contains("4294967295 bytes") && reason.contains(&FRAME_BYTES_MAX.to_string()), "{reason}");
}

#[test]
fn callers_who_are_no_rank_are_hung_up_on() {
    let doorway = Doorway::open("127.0.0.1:0").expect("a free port");
    let address = doorway.address().expect("it is open");
    let call = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(address).expect("it is open");
        stream.write_all(bytes).expect("it is buffered");
        stream.shutdown(Shutdown::Write).expect("it is connected");
        stream
    };
    let refused = [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"",
        &greeting(3, 1, 0),
        &greeting(2, 0, 0),
        &greeting(2, 2, 0),
        &greeting(2, 1, 1),
    ]
    .map(call);
    let peer = call(&greeting(2, 1, 0));
    let lane = doorway.pass(0, &[address, address], PATIENT.timeout).expect("rank 1 called last");
    for mut stream in refused {
        // The end of the connection, or its reset where bytes were left unread.
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    }
    drop(peer);
    assert_eq!((next(&lane).from, lane.receive()), (1, None));
}

/// Before it come addresses where nobody answers, where nobody listens, and where a service or another rank does.
#[test]
fn a_rank_is_found_at_whichever_of_its_addresses_it_is() {
    let address = |door: &Doorway| door.address().expect("it is open");
    let mute = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let silent = mute.local_addr().expect("it is open");
    // Another service, which says something else.
    let service = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let other = service.local_addr().expect("it is open");
    thread::spawn(move || {
        let mut callers = Vec::new();
        for stream in service.incoming() {
            let mut stream = stream.expect("a caller");
            stream.write_all(b"SSH-2.0-other\r\n").unwrap_or_default();
            callers.push(stream);
        }
    });
    let closed = address(&Doorway::open("127.0.0.1:0").expect("a free port"));
    let doors: Vec<Doorway> = (0..3).map(|_| Doorway::open("127.0.0.1:0").expect("a free port")).collect();
    let at: Vec<SocketAddr> = doors.iter().map(address).collect();
    let addresses = [0, 1, 2].map(|rank| vec![silent, closed, other, at[(rank + 1) % 3], silent, at[rank]]);
    let pass =
        |(rank, door): (usize, Doorway)| door.pass_any(rank, &addresses, PATIENT.timeout).expect("all are found");
    let lanes: Vec<Lane> = thread::scope(|scope| {
        let passing: Vec<_> = doors.into_iter().enumerate().map(|door| scope.spawn(move || pass(door))).collect();
        passing.into_iter().map(|lane| lane.join().expect("it does not panic")).collect()
    });
    for from in 0..3 {
        lanes[from].send_all(&said("here"));
        let others = (0..3).filter(|&rank| rank != from);
        others.for_each(|rank| assert_eq!(next(&lanes[rank]), Received { from, signal: said("here") }));
    }
}

/// Some say nothing at all, and one rank calls twice, as one that has tried two addresses does.
#[test]
fn callers_that_say_nothing_hold_up_nobody() {
    let doorway = Doorway::open("127.0.0.1:0").expect("a free port");
    let address = doorway.address().expect("it is open");
    let _mute: Vec<TcpStream> = (0..3).map(|_| TcpStream::connect(address).expect("it is open")).collect();
    let mut calls = [0, 1].map(|_| TcpStream::connect(address).expect("it is open"));
    calls.iter_mut().for_each(|call| call.write_all(&greeting(3, 1, 0)).expect("it is buffered"));
    let mut last = TcpStream::connect(address).expect("it is open");
    let answered = thread::scope(|scope| {
        let passing = scope.spawn(|| doorway.pass(0, &[address; 3], Duration::from_secs(4)));
        // Rank 2 calls when rank 1 has been answered twice.
        let answered = calls.each_mut().map(|call| call.read_exact(&mut [0; 8]).is_ok());
        last.write_all(&greeting(3, 2, 0)).expect("it is read");
        assert!(passing.join().expect("it does not panic").is_ok(), "all ranks have called");
        answered
    });
    assert_eq!(answered.iter().filter(|&&is_welcome| is_welcome).count(), 1, "one is welcome, the other is hung up on");
}

/// Over IPv6, too, where the system has it.
#[test]
fn ranks_call_each_other_by_ipv6() {
    let Ok(first) = Doorway::open("[::1]:0") else {
        // Past what captures a test's output.
        return writeln!(stderr(), "ranks_call_each_other_by_ipv6 tests nothing: no IPv6").expect("stderr");
    };
    let second = Doorway::open("[::]:0").expect("a free port");
    let at = |door: &Doorway| SocketAddr::new(Ipv6Addr::LOCALHOST.into(), door.address().expect("it is open").port());
    let addresses = [at(&first), at(&second)];
    let lanes: [Lane; 2] = thread::scope(|scope| {
        let other = scope.spawn(|| second.pass(1, &addresses, PATIENT.timeout).expect("rank 0 is there"));
        [first.pass(0, &addresses, PATIENT.timeout).expect("rank 1 calls"), other.join().expect("it does not panic")]
    });
    lanes[1].send(0, &said("here"));
    assert_eq!(next(&lanes[0]), Received { from: 1, signal: said("here") });
}

/// Each of many ranks hears all others, in their order.
#[test]
fn many_ranks_hear_each_other() {
    const RANKS: usize = 20;
    let lanes = connected(RANKS);
    thread::scope(|scope| {
        for lane in &lanes {
            scope.spawn(|| (0..3).for_each(|index| lane.send_all(&said(&index.to_string()))));
        }
    });
    for lane in &lanes {
        let mut heard = [0; RANKS];
        for _ in 0..3 * (RANKS - 1) {
            let Received { from, signal } = next(lane);
            assert_eq!(signal, said(&heard[from].to_string()), "of rank {from}");
            heard[from] += 1;
        }
        assert_eq!((heard[lane.rank()], lane.receive()), (0, None));
    }
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let doorway = || Doorway::open("127.0.0.1:0").expect("a free port");
    let (first, second) = (doorway(), doorway());
    let addresses: Vec<SocketAddr> = [&first, &second].map(|door| door.address().expect("it is open")).to_vec();
    let patience = Duration::from_millis(20);
    let error = first.pass(0, &addresses, patience).err().expect("nobody calls");
    assert!(error.to_string().contains("rank(s) [1] did not connect to rank 0 within 20ms"), "{error}");
    let error = second.pass(1, &addresses, patience).err().expect("rank 0 has gone");
    assert!(error.to_string().contains(&format!("rank 0 at {}", addresses[0])), "{error}");
}
