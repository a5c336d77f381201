using System;
using System.Collections.Generic;
using System.Linq;
using System.Reflection;
using System.Threading.Tasks;

namespace SimpleBus.Client.Tests
{
    /// <summary>Marks a test: a static method that returns a Task and takes no argument.</summary>
    [AttributeUsage(AttributeTargets.Method)]
    public sealed class TestAttribute : Attribute
    {
    }

    /// <summary>
    /// Runs the tests of this assembly, or a program that a test in Python controls.
    /// <code>
    /// ClientTests run URL VECTORS [NAME…]    prints "passed NAME", or "failed NAME" and the error
    /// ClientTests publish|consume|connect …  see Programs
    /// ClientTests load JOB                   see LoadPrograms
    /// </code>
    /// </summary>
    public static class Runner
    {
        private static readonly TimeSpan Patience = TimeSpan.FromSeconds(60);

        /// <summary>Address of the server of all tests.</summary>
        public static string Url { get; private set; } = "";

        /// <summary>Folder of the vectors.</summary>
        public static string Vectors { get; private set; } = "";

        public static async Task<int> Main(string[] arguments)
        {
            switch (arguments[0])
            {
                case "run":
                    Url = arguments[1];
                    Vectors = arguments[2];
                    return await RunTestsAsync(arguments.Skip(3).ToHashSet());
                case "load":
                    await LoadPrograms.RunAsync(arguments[1]);
                    return 0;
                default:
                    return await Programs.RunAsync(arguments);
            }
        }

        private static async Task<int> RunTestsAsync(HashSet<string> names)
        {
            int failedCount = 0;
            TaskScheduler.UnobservedTaskException += (_, failure) =>
            {
                failedCount++;
                Console.WriteLine($"failed unobserved {failure.Exception}".Replace("\n", " "));
            };
            IEnumerable<MethodInfo> tests = Assembly.GetExecutingAssembly().GetTypes()
                .SelectMany(type => type.GetMethods(BindingFlags.Public | BindingFlags.Static))
                .Where(method => method.GetCustomAttribute<TestAttribute>() != null);
            foreach (MethodInfo test in tests.Where(test => names.Count == 0 || names.Contains(test.Name)))
            {
                try
                {
                    Task running = Task.Run(() => (Task)test.Invoke(null, null)!);
                    if (await Task.WhenAny(running, Task.Delay(Patience)) != running)
                        throw new TimeoutException($"the test did not end within {Patience}");
                    await running;
                    Console.WriteLine($"passed {test.Name}");
                }
                catch (Exception error)
                {
                    failedCount++;
                    Console.WriteLine($"failed {test.Name} {error}".Replace("\n", " "));
                }
            }
            GC.Collect();
            GC.WaitForPendingFinalizers();
            return failedCount == 0 ? 0 : 1;
        }
    }

    /// <summary>Assertions.</summary>
    internal static class Check
    {
        public static void Equal<T>(T expected, T actual)
        {
            if (!EqualityComparer<T>.Default.Equals(expected, actual))
                throw new InvalidOperationException($"expected {expected}, got {actual}");
        }

        public static void Sequence<T>(IEnumerable<T> expected, IEnumerable<T> actual)
        {
            if (!expected.SequenceEqual(actual))
                throw new InvalidOperationException(
                    $"expected [{string.Join(", ", expected)}], got [{string.Join(", ", actual)}]");
        }

        public static void True(bool condition, string what)
        {
            if (!condition)
                throw new InvalidOperationException($"it is not true that {what}");
        }

        public static async Task<TError> ThrowsAsync<TError>(Func<Task> call)
            where TError : Exception
        {
            try
            {
                await call();
            }
            catch (TError error)
            {
                return error;
            }
            throw new InvalidOperationException($"no {typeof(TError).Name} was thrown");
        }

        public static TError Throws<TError>(Action call)
            where TError : Exception
        {
            try
            {
                call();
            }
            catch (TError error)
            {
                return error;
            }
            throw new InvalidOperationException($"no {typeof(TError).Name} was thrown");
        }
    }
}
